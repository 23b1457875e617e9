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

# A rank that fails ends the others. One that a signal has stopped (75) has saved, as have all.
start() {
    srun --kill-on-bad-exit=1 \
        sh -c 'trap : TERM; "$@" || { code=$?; [ $code -eq 75 ] || exit $code; }' train \
        {{command}}
}
for attempt in $(seq 0 {{restarts}}); do
    start
    code=$?
    # 2: the run was refused, as it would be again.
    case $code in 0 | 2) break ;; esac
done
# Slurm's warning or a preemption: the same job goes on from its newest checkpoint. A file STOP ends it.
if [ $code -eq 0 ] && tail -n 1 -- {{journal}} | grep -qE '"event": "stop".*"by": "SIG(TERM|USR1)"'; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
