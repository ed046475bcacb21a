#!/usr/bin/env bash
# Everything that must pass: format, lint, types, the rooms' import rules, tests.
#
# usage: run.sh [--fast] [ARGUMENT ...]
#
# With --fast, the tests that need no engine and no network and are not marked slow. Arguments go to
# pytest: bash tests/run.sh -k replay
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

chosen="not gpu and not emulated and not soak"
engines=yes
if [ "${1:-}" = --fast ]; then
  shift
  engines=no
  chosen+=" and not engine and not network and not slow"
fi

# A network may be slow, or unavailable for a moment. The tests install packages, too.
export PIP_RETRIES="${PIP_RETRIES:-10}" PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-120}"
export UV_HTTP_RETRIES="${UV_HTTP_RETRIES:-10}" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-120}"

# First of all: Podman, which is installed below for its tests, would pass for an engine.
setup=(train dev)
if [ "$engines" = no ]; then setup+=(--no-engine); fi
bash scripts/setup.sh "${setup[@]}"

# Tools that are not ours verify our bundles and count our system calls; a static busybox is the
# tests' smallest image. A browser shows the report. A Slurm cluster of this machine runs a study.
# A registry of this machine keeps images, and skopeo reads them. Shells complete our commands.
programs=(npm:npm node:nodejs openssl:openssl ssh-keygen:openssh-client zstd:zstd
  busybox:busybox-static strace:strace chromium:chromium chromedriver:chromium-driver
  pdftotext:poppler-utils munged:munge slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client
  docker-registry:docker-registry skopeo:skopeo zsh:zsh fish:fish)
if [ "$engines" = yes ]; then programs+=(podman:podman bwrap:bubblewrap mmdebstrap:mmdebstrap); fi
packages=()
for program in "${programs[@]}"; do
  # Debian's daemons are in /usr/sbin, which is not on the PATH of an ordinary user.
  PATH="$PATH:/usr/sbin" command -v "${program%%:*}" >/dev/null || packages+=("${program#*:}")
done
if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    mkdir -p .cache
    # shellcheck source=scripts/packages.sh
    source scripts/packages.sh
    install_debian_packages "${packages[@]}"
  else
    echo "tests: missing Debian packages: ${packages[*]}" >&2
    exit 1
  fi
fi
if [ "$engines" = yes ] && [ "$(id -u)" -eq 0 ]; then
  # shellcheck source=scripts/engines.sh
  source scripts/engines.sh
  if ! podman_answers 0; then
    trap 'kill "$(cat .cache/podman.pid)" 2>/dev/null || true; rm -f .cache/podman.pid /run/podman/podman.sock' EXIT
    start_podman || echo "tests: those of Podman will be skipped" >&2
  fi
fi

step() {
  printf '\n== %s\n' "$*" >&2
  "$@"
}
export PATH="$PWD/.venv/bin:$PATH"
# Some hundred tests start an interpreter that imports torch, which takes 1.2 s of processor time with
# bytecode and 2.8 s without: the first of them keeps it.
unset PYTHONDONTWRITEBYTECODE
mypy >.cache/mypy.log 2>&1 & # beside the others, most of which use one core
types=$!
step ruff format --check
step ruff check
step lint-imports
step check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
step check-jsonschema --quiet --builtin-schema vendor.github-actions action.yml
if [ ! -e tests/__pycache__ ]; then
  # Each process of the tests imports all of them, which takes 11 s of processor time with bytecode
  # and 20 s without. One process makes the bytecode for the others here, beside mypy.
  step pytest --collect-only --quiet >.cache/collection.log || { cat .cache/collection.log >&2; exit 1; }
fi
step bash scripts/lint-c.sh
printf '\n== mypy\n' >&2
wait "$types" || { cat .cache/mypy.log >&2; exit 1; }
# Four processes, each with whole groups of tests in the order of tests/conftest.py: one of them mostly
# waits for containers, and others for processes of a cluster. A test that ends its process ends the
# run, since pytest-xdist would wait without end for what is left of the group.
step pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 \
  --durations 40 -m "$chosen" "$@"
