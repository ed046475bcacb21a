#!/usr/bin/env bash
# Tests whether Capsule works with this machine's NVIDIA GPU, which takes a quarter to half an hour, and
# packs the results into one signed file, which can be attached to an issue.
#
# The script needs NVIDIA's driver, the NVIDIA Container Toolkit with Docker or Podman, 30 GB of disk,
# and the requirements of scripts/setup.sh. It sends no data to other machines.
#
# usage: gpu-acceptance.sh [--cpu] [FOLDER]
#
# FOLDER (default: gpu-acceptance) must not exist. With --cpu the same runs are made without a GPU,
# which tests the script itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=cuda
if [ "${1:-}" = --cpu ]; then
  kind=cpu
  shift
fi
folder=${1:-gpu-acceptance}
if [ -e "$folder" ]; then
  echo "gpu-acceptance: $folder exists; name another folder" >&2
  exit 1
fi

bash scripts/setup.sh train dev
python=.venv/bin/python
if [ "$kind" = cuda ]; then
  # The environment for development has torch's build for CPUs. This environment has the same versions
  # of all packages, and PyPI's build of torch for CUDA.
  python=.cache/gpu-venv/bin/python
  wanted=.cache/gpu-requirements.txt
  grep -hoE '^[A-Za-z0-9._-]+==[^ ;+]+' requirements/*.txt | sort -u >"$wanted"
  # This copy is written last, so an installation that failed or was interrupted is repeated.
  installed=.cache/gpu-venv/requirements.txt
  if ! cmp -s "$wanted" "$installed"; then
    python3 -m venv --clear .cache/gpu-venv
    .venv/bin/python -m uv pip install --python "$python" -r "$wanted"
    .venv/bin/python -m uv pip install --python "$python" --no-deps --no-build-isolation --editable .
    cp "$wanted" "$installed"
  fi
fi
exec "$python" scripts/gpu_acceptance.py "$kind" "$folder"
