#!/usr/bin/env bash
# Prepares this checkout: it makes .venv with Capsule in it, and starts a container engine if possible.
#
# The script needs only Python 3.11 or newer and git. As root on Debian it installs missing packages
# and starts Docker if no engine answers; otherwise runs use the plain-process engine. It can be
# interrupted and repeated, and uses the machine's configuration of pip, apt and certificates.
#
# usage: setup.sh [--no-engine] [train] [dev]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .cache

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

engine=yes
parts=()
for argument in "$@"; do
  case $argument in
    --no-engine) engine=no ;;
    train | dev) parts+=("$argument") ;;
    *) fail "unknown argument '$argument'; usage: setup.sh [--no-engine] [train] [dev]" ;;
  esac
done

# ---- What the system must have

is_root() { [ "$(id -u)" -eq 0 ]; }
has() { command -v "$1" >/dev/null; }

# A client may be installed without a running engine: Podman, for example, needs its service.
has_engine() {
  [ -n "${DOCKER_HOST:-}${CONTAINER_HOST:-}" ] || has dockerd ||
    { has docker && docker version >/dev/null 2>&1; } ||
    [ -S /run/podman/podman.sock ] || [ -S "${XDG_RUNTIME_DIR:-/run/user/$(id -u)}/podman/podman.sock" ]
}

missing_packages() {
  python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
  [ -e "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" ] || echo ca-certificates
  if [ "$engine" = yes ] && ! has_engine; then echo docker.io; fi
}

install_packages() {
  local packages
  mapfile -t packages < <(missing_packages)
  if [ ${#packages[@]} -eq 0 ]; then return; fi
  if is_root && has apt-get; then
    # shellcheck source=scripts/packages.sh
    source scripts/packages.sh
    install_debian_packages "${packages[@]}"
  elif [[ " ${packages[*]} " == *" python3-venv "* ]]; then
    fail "Python's venv module is incomplete; ask for the Debian package python3-venv"
  fi
}

# ---- .venv

# A text that changes when the packages to be installed change, and when the checkout moves.
stamp() {
  {
    cat pyproject.toml hatch_build.py requirements/*.txt
    find capsule/native/source -type f | LC_ALL=C sort | xargs cat
    python3 --version
    pwd
    echo "$1"
  } | sha256sum | cut -d' ' -f1
}

installed() {
  local part
  [ -e capsule/native/lib/capsule-launch ] || return 1
  for part in host "${parts[@]}"; do
    [ "$(cat ".venv/stamp-$part" 2>/dev/null)" = "$(stamp "$part")" ] || return 1
  done
}

finished_before() { compgen -G '.venv/stamp-*' >/dev/null; }

# Whether .venv is complete and was made at this place: its programs name their interpreter by path.
usable_venv() {
  .venv/bin/python -m pip --version >/dev/null 2>&1 && grep -qF "$PWD/.venv/" .venv/bin/pip
}

install_capsule() {
  if installed; then return; fi
  say "installing Capsule${parts[*]:+ with ${parts[*]}} into .venv"
  # uv considers a package installed if its metadata exist, which it writes first. So after an
  # interrupted installation, everything is installed again.
  { finished_before && usable_venv; } || python3 -m venv --clear .venv
  rm -f .venv/stamp-*
  # pip, for which the machine is configured, installs uv, which installs the rest ten times faster.
  .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check \
    --require-hashes --requirement requirements/setup.txt
  PYTHONPATH=. .venv/bin/python scripts/install.py "${parts[@]}"
  local part
  for part in host "${parts[@]}"; do stamp "$part" >".venv/stamp-$part"; done
}

# ---- The engine

engine_answers() {
  .venv/bin/python - <<'PYTHON'
import sys

from capsule.engine.select import open_engine

engine = open_engine("auto", progress=lambda _: None)
sys.exit(engine.name == "process")
PYTHON
}

prepare_engine() {
  if engine_answers; then return; fi
  if is_root && has dockerd && [ -z "${DOCKER_HOST:-}" ]; then
    # shellcheck source=scripts/engines.sh
    source scripts/engines.sh
    if start_docker; then return; fi
  fi
  say "no container engine answers: runs will use the plain-process engine (--engine process)"
}

# Only one setup runs at a time per checkout; a daemon started below must not inherit the lock.
exec 9>.cache/setup.lock
flock 9
install_packages
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$(python3 --version) is too old; Python 3.11 or newer is required"
install_capsule
if [ "$engine" = yes ]; then prepare_engine; fi
say "ready (${SECONDS} s)"
