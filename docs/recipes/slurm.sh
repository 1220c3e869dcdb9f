#!/bin/bash
# KLN on several GPUs and nodes: sbatch docs/recipes/slurm.sh configs/svhn.py
#SBATCH --job-name=kln
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to the tasks two minutes before the time is over: they save and end.
#SBATCH --signal=TERM@120
set -uo pipefail

config=${1:-configs/svhn.py}
# One directory for the job and all its restarts, on a file system that all nodes share.
workdir=${WORKDIR:-runs/slurm-$SLURM_JOB_ID}

# One process a GPU, each of which sees all GPUs of its node and takes that of its number
# there; together they must divide batch_size, the n of the estimator. The first to end
# must not kill those that still save, and srun does not take the cores from sbatch.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py \
  --config="$config" --config.platform=gpu \
  --config.checkpoint_every_steps=200 --workdir="$workdir"
status=$?

# 75: it was asked to stop and has saved, or has lost a node, where JAX may abort instead,
# 134; 143: it was asked to stop before it listened. Up to 20 times it goes on: srun gives
# the highest status, so that of a task with an error, 1, is not seen.
case $status in
  75 | 134 | 143)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$status"
