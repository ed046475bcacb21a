#!/usr/bin/env bash
# Tests the commands of the README on a fresh system that has Python and git: Debian 12, unless
# another system is named. The system gets this machine's client configuration of apt, pip and npm,
# and its certificates.
#
# The last commit of this checkout is cloned into a root made by mmdebstrap, and the command runs
# there in its own mount and process namespaces, so none of its processes and mounts remain when it
# ends. Docker runs inside; the daemon that scripts/engines.sh starts has its own network namespace, so
# it does not affect this machine's Docker.
#
# usage: bare-root.sh [breakout|tests|setup|author] [SUITE]
#
# author runs scripts/author.sh. SUITE is bookworm, another release of Debian, noble (Ubuntu 24.04),
# or none, which is bookworm without apt, dpkg and their data. On the last two, no package can be
# installed afterwards.
set -euo pipefail

if [ "${1:-}" = --inside ]; then
  # This part runs in the namespaces; the mounts vanish with them.
  root=$2 command=$3
  mount --bind "$root" "$root" # so that / is a mount inside, as on any machine
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/run"
  while read -r folder; do
    mkdir -p "$root$folder"
    mount --bind -o ro "$folder" "$root$folder"
  done <"$root/root/local-sources"
  # Only the variables that configure package sources and certificates are passed on.
  kept=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)
  while read -r name; do kept+=("$name=${!name}"); done < <(
    compgen -e | grep -E '^(PIP_.*|XDG_CONFIG_.*|.*_CERTS?(_.*)?|.*_CA_.*|SSL_.*|.*_CAINFO|([a-z]+|[A-Z]+)_(proxy|PROXY))$'
  )
  # In a chroot, the kernel would not allow user namespaces.
  mkdir "$root/.machine"
  cd "$root"
  pivot_root . .machine
  exec /usr/bin/env -i "${kept[@]}" bash -c \
    "umount -l /.machine && rmdir /.machine && cd /root/capsule && $command"
fi

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
host=${2:-bookworm}
suite=${host/none/bookworm}
included=python3,git
if [ "$host" != bookworm ]; then included+=,python3-venv,ca-certificates,bubblewrap; fi
case ${1:-breakout} in
  breakout) command='bash examples/breakout.sh' ;;
  tests) command='bash tests/run.sh' ;;
  setup) command='bash scripts/setup.sh && .venv/bin/capsule doctor --profile none' ;;
  author) command='bash scripts/author.sh' included=python3,git,python3-venv,ca-certificates,bubblewrap ;;
  *) echo "usage: bare-root.sh [breakout|tests|setup|author] [SUITE]" >&2; exit 2 ;;
esac
[ "$(id -u)" -eq 0 ] || { echo "bare-root: this script must be run as root" >&2; exit 1; }
if ! command -v mmdebstrap >/dev/null; then
  mkdir -p "$checkout/.cache"
  cd "$checkout"
  # shellcheck source=scripts/packages.sh
  source scripts/packages.sh
  install_debian_packages mmdebstrap
fi

root=$(mktemp -d "${TMPDIR:-/var/tmp}/capsule-bare-root.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT

copy_in() {
  local file
  for file in "$@"; do
    if [ -f "$file" ]; then install -D -m 644 "$file" "$root$file"; fi
  done
}

# Copies the files whose absolute paths a configuration contains: constraints, certificates, keys.
copy_named_in() {
  local file
  while read -r file; do copy_in "$file"; done < <(grep -oE "/[^ '\",;]+" | sort -u)
}

# apt: proxies, certificates and the like, as one file; and the sources, if they are of Debian 12.
apt-config dump | grep '^Acquire::' >"$root.apt" || true
trap 'rm -rf --one-file-system "$root" "$root.apt"' EXIT
archive=()
if [ "$suite" = noble ]; then # the machine has no key of Ubuntu's, and this test needs none
  archive=("deb [trusted=yes] http://archive.ubuntu.com/ubuntu noble main universe")
fi
mmdebstrap --quiet --variant=minbase --include="$included" --aptopt="$root.apt" \
  "$suite" "$root" "${archive[@]}"
if [ "$suite" = bookworm ] && grep -q '^VERSION_CODENAME=bookworm' /etc/os-release; then
  rm -f "$root/etc/apt/sources.list"
  copy_in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} /etc/apt/keyrings/*
fi
copy_named_in <"$root.apt"

# pip and npm: their configuration files, the files that these name, and the local folders, which are
# mounted read-only. The pages of a local index link to files next to it, so its parent folder is
# mounted.
python3 -m pip config debug | sed -n 's/, exists: True$//p' | copy_named_in
python3 -m pip config list | copy_named_in
for file in ~/.npmrc /etc/npmrc; do
  if [ -f "$file" ]; then copy_in "$file"; copy_named_in <"$file"; fi
done
local_paths() {
  python3 -m pip config list | grep -E "$1" | grep -oE "(file://)?/[^ '\"]+" |
    sed 's|^file://||' | grep '^/[^/]' || true
}
{
  local_paths find-links
  local_paths index-url | while read -r path; do dirname "$path"; done
} | sort -u | while read -r path; do
  if [ -d "$path" ] && [ "$path" != / ]; then echo "$path"; fi
done >"$root/root/local-sources"

# Certificates and name service.
copy_in "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" /etc/ssl/certs/ca-certificates.crt \
  /etc/resolv.conf /etc/hosts

git clone --quiet "$checkout" "$root/root/capsule"

packages=$(dpkg-query --admindir="$root/var/lib/dpkg" -W | wc -l)
echo "bare-root: $suite with $packages packages; running: $command" >&2
if [ "$host" = none ]; then
  rm -rf "$root"/etc/apt "$root"/var/lib/{apt,dpkg} "$root"/usr/lib/{apt,dpkg} "$root"/usr/share/keyrings \
    "$root"/usr/bin/{apt,dpkg}* "$root/usr/bin/gpgv" "$root/etc/debian_version"
  rm "$root/etc/os-release"
  printf 'ID=none\nNAME=None\nVERSION_ID=1\n' >"$root/etc/os-release"
fi
started=$SECONDS
status=0
unshare --mount --propagation private --pid --fork --kill-child \
  bash "${BASH_SOURCE[0]}" --inside "$root" "$command" || status=$?
echo "bare-root: status $status after $((SECONDS - started)) s" >&2
exit "$status"
