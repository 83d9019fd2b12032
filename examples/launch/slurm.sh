#!/usr/bin/env bash
# Trains on several machines by SLURM, from a copy of this repository that all of them see:
#
#     sbatch examples/launch/slurm.sh
#
# srun starts a process for each GPU and Lightning finds them. Arguments go to the program.
#SBATCH --job-name=lightning_3d
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Two minutes before the time is over, all ranks save a checkpoint, and Lightning has the job queued again.
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
set -euo pipefail

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m examples.cli.main fit \
    --config=conf/cli/pp2.yaml \
    --trainer.num_nodes="$SLURM_NNODES" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE" \
    "$@"
