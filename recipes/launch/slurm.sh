#!/usr/bin/env bash
# Trains on the GPUs of several machines under Slurm, from a checkout with its .venv on a shared disk:
#
#   sbatch recipes/launch/slurm.sh [FLAGS OF train]
#
# Settings are environment variables; other sizes are flags of sbatch, as --nodes=4. Submitted again, or after Slurm
# has put it back into the queue, it goes on from the last checkpoint.
#SBATCH --job-name=flaxformer_mt
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

: "${PYTHON:=.venv/bin/python}"  # the Python that has the package
: "${CONFIG:=toy_de_en}"         # recipe or file
: "${RUN:=runs/$CONFIG}"         # run directory, on the shared disk, or gs://..., s3://...

# One task for each GPU: JAX gives a task the GPU that has its number on the machine, so all tasks of a machine have to
# see all of its GPUs (no --gpus-per-task). At the end of the time, each task gets SIGTERM and a checkpoint is saved.
srun --kill-on-bad-exit=1 "$PYTHON" -m flaxformer_mt train --config="$CONFIG" --run="$RUN" --distributed "$@"
