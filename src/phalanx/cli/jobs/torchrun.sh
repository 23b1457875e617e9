# The same command on each of {{nodes}} nodes. All of them reach {{master}}, and share {{out}}.
# Where a node's own name does not lead to it, add --local-addr and its address, and on {{master}}
# --rdzv-conf=is_host=1. The run ends with that node; others may leave and come back.
# A store of its own for each start: ranks of a start with other nodes must not meet those of the last.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes={{elastic_nodes}} --nproc-per-node={{ranks}} --max-restarts={{restarts}} \
    --rdzv-backend=c10d --rdzv-id={{name}} --rdzv-endpoint={{master}}:29400 \
    --no-python {{command}}
