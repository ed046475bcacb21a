#!/usr/bin/env bash
# Everything that must pass: format, lint, types, the rooms' import rules, tests.
# Arguments go to pytest: bash tests/run.sh -k engine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# First of all: Podman, which is installed below for its tests, would pass for an engine.
bash scripts/setup.sh train dev

# Tools that are not ours verify our bundles and count our system calls; a static busybox is the
# tests' smallest image. A browser shows the report.
packages=()
for program in npm:npm node:nodejs openssl:openssl ssh-keygen:openssh-client zstd:zstd \
  busybox:busybox-static podman:podman strace:strace chromium:chromium \
  chromedriver:chromium-driver pdftotext:poppler-utils; do
  command -v "${program%%:*}" >/dev/null || packages+=("${program#*:}")
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
if [ "$(id -u)" -eq 0 ]; then
  # shellcheck source=scripts/engines.sh
  source scripts/engines.sh
  if ! podman_answers 0; then
    trap 'kill "$(cat .cache/podman.pid)"; rm -f .cache/podman.pid /run/podman/podman.sock' EXIT
    start_podman || echo "tests: those of Podman will be skipped" >&2
  fi
fi

step() {
  printf '\n== %s\n' "$*" >&2
  "$@"
}
export PATH="$PWD/.venv/bin:$PATH"
step ruff format --check
step ruff check
step mypy
step lint-imports
tests=(pytest -m "not gpu and not emulated and not soak")
if [ $# -gt 0 ]; then
  step "${tests[@]}" "$@"
  exit
fi
# Two halves side by side, which take about as long as each other. What asks engines for containers
# or a cluster is in the second one, which is shown as it goes. Training has a process of its own:
# its oracles bring JAX, after which a process should not fork.
first=(benchmarks/tests tests/bundle tests/diagnosis tests/docs tests/examples tests/fuzz
  tests/hostile tests/image tests/report tests/verification)
first_half() {
  local status=0
  "${tests[@]}" tests/training || status=$?
  "${tests[@]}" "${first[@]}" || status=$?
  return "$status"
}
mkdir -p .cache
# A shell has what it starts in the background ignore interrupts, which tests send.
tests=(env --default-signal=INT,QUIT "${tests[@]}")
first_half >.cache/first-half.log 2>&1 &
half=$!
status=0
step "${tests[@]}" --ignore=tests/training "${first[@]/#/--ignore=}" || status=$?
printf '\n== the first half\n' >&2
wait "$half" || status=$?
cat .cache/first-half.log
exit "$status"
