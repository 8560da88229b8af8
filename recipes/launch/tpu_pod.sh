#!/usr/bin/env bash
# Trains on all machines of a TPU pod slice, from a checkout on any machine with gcloud:
#
#   recipes/launch/tpu_pod.sh NAME ZONE gs://BUCKET/RUN [FLAGS OF train]
#
# NAME: a slice, as `gcloud compute tpus tpu-vm create` makes it, whose account may write to the bucket. What is
# committed is copied to its machines. Started again, it goes on from the last checkpoint.
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "error: usage: recipes/launch/tpu_pod.sh NAME ZONE gs://BUCKET/RUN [FLAGS OF train]" >&2
    exit 2
fi
name=$1 zone=$2 run=$3
shift 3

: "${CONFIG:=toy_de_en}"  # recipe or file

archive=$(mktemp -d)/flaxformer_mt.tar.gz
trap 'rm -r "$(dirname "$archive")"' EXIT
git -C "$(dirname "$0")/../.." archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$name:" --zone="$zone" --worker=all

# The machines have a Python that is too old: uv brings another one.
printf -v install '%s && ' \
    'mkdir -p flaxformer_mt' \
    'tar -xzf flaxformer_mt.tar.gz -C flaxformer_mt' \
    'cd flaxformer_mt' \
    'python3 -m pip install --quiet --user uv' \
    'python3 -m uv venv --quiet --allow-existing --python=3.12 .venv' \
    'python3 -m uv pip install --quiet --python=.venv --constraint=requirements.txt ".[tpu,gs]"'
printf -v train '%q ' .venv/bin/python -m flaxformer_mt train --config="$CONFIG" --run="$run" --distributed "$@"
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$install$train"
