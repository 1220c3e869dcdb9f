#!/bin/bash
# KLN on all hosts of a TPU slice: docs/recipes/tpu-vm.sh NAME ZONE configs/svhn.py
# The repository and its packages (pip install 'jax[tpu]' .) lie in ~/kln_jax on each.
set -euo pipefail

name=$1 zone=$2 config=${3:-configs/svhn.py}

# Exit status 75: it was asked to stop and has saved, or has lost a host, where JAX may
# abort instead, 134. Up to 20 times it goes on. The number of chips must divide
# batch_size, the n of the estimator.
for _ in {1..20}; do
  status=0
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="
    cd ~/kln_jax && python train.py --config=$config --config.platform=tpu \
      --config.checkpoint_every_steps=200 --workdir=runs/$name" || status=$?
  [ "$status" -eq 75 ] || [ "$status" -eq 134 ] || exit "$status"
done
exit "$status"
