#!/usr/bin/env bash
# Trains on several machines by torchrun. Start it on each of them, in a copy of this repository:
#
#     NUM_NODES=2 GPUS_PER_NODE=8 MASTER=host0:29500 examples/launch/torchrun.sh
#
# MASTER is one of the machines and a free port there; a single machine needs none. Arguments go to the program.
# The Trainer gets the same numbers of nodes and devices as torchrun, which starts its processes.
set -euo pipefail

num_nodes=${NUM_NODES:-1}
gpus_per_node=${GPUS_PER_NODE:-2} # or processes, on machines without GPUs

exec torchrun \
    --nnodes="$num_nodes" \
    --nproc-per-node="$gpus_per_node" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${MASTER:-localhost:0}" \
    --rdzv-id="${RUN_ID:-lightning_3d}" \
    -m examples.cli.main fit \
    --config=conf/cli/pp2.yaml \
    --trainer.num_nodes="$num_nodes" \
    --trainer.devices="$gpus_per_node" \
    "$@"
