#!/usr/bin/env bash
# Checks kln_jax on a GPU; see gpu_check.py.
#   benchmarks/gpu_check.sh pack DATA_DIR           # with a network and Fashion-MNIST
#   benchmarks/gpu_check.sh run OUT [--seconds=420]  # with the GPU; nothing is fetched
set -euo pipefail
# A path is as seen from where this is called.
case ${2:--} in
  -*) ;;
  *) set -- "$1" "$(realpath -m -- "$2")" "${@:3}" ;;
esac
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ "${1:-}" = pack ]; then
  # Pure Python, so that they fit any version of it.
  "$PYTHON" -m pip download --quiet --no-deps --dest .gpu/wheels ml_collections tensorboardX
else
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  for wheel in .gpu/wheels/*.whl; do
    [ -e "$wheel" ] || continue
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "$wheel"
  done
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" -m benchmarks.gpu_check "$@"
