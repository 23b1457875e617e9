#!/bin/bash
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{ranks}}
{{sbatch_gpus}}
#SBATCH --time={{time}}
#SBATCH --signal=TERM@{{grace}}  # to every rank, before the time limit: it finishes its step and saves
#SBATCH --requeue  # after a node has failed
#SBATCH --open-mode=append
#SBATCH --output={{name}}-%j.out

# A rank that fails ends the others. One that was stopped has saved, as have all: that is no failure.
start() {
    srun --kill-on-bad-exit=1 \
        sh -c 'trap : TERM; "$@" || { code=$?; [ $code -eq 75 ] || exit $code; }' train \
        {{command}}
}
code=1
for attempt in $(seq 0 {{restarts}}); do
    start && code=0 && break
done
if [ $code -eq 0 ] && tail -n 1 -- {{journal}} | grep -q '"event": "stop"'; then
    scontrol requeue "$SLURM_JOB_ID"  # the same job goes on from its newest checkpoint
fi
exit $code
