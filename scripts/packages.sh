# shellcheck shell=bash
# To be sourced: installs Debian packages without questions and without starting services.

install_debian_packages() {
  printf 'setup: installing %s\n' "$*" >&2
  (
    export DEBIAN_FRONTEND=noninteractive
    # A machine without systemd has no service manager; scripts start the services that they need.
    policy=/usr/sbin/policy-rc.d
    if [ ! -d /run/systemd/system ] && [ ! -e "$policy" ]; then
      printf '#!/bin/sh\nexit 101\n' >"$policy"
      chmod +x "$policy"
      trap 'rm -f "$policy"' EXIT
    fi
    keep_certificates
    patiently update_and_install "$@"
  )
}

update_and_install() {
  local apt=(apt-get -qq -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5)
  { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@"; } \
    >/dev/null 2>.cache/apt.log || { cat .cache/apt.log >&2; return 1; }
}

# Run a command until it succeeds, four times at most: another apt may hold the locks of the lists, and
# a mirror may be unavailable for a moment.
patiently() {
  local pause
  for pause in 10 30 60; do
    "$@" && return
    printf 'setup: failed; another attempt follows in %s seconds\n' "$pause" >&2
    sleep "$pause"
  done
  "$@"
}

# The package ca-certificates replaces an existing bundle. A bundle that was installed by hand may be
# required for the machine's package sources, so it becomes part of the new one.
keep_certificates() {
  local bundle=/etc/ssl/certs/ca-certificates.crt own=/usr/local/share/ca-certificates
  if [ -e "$bundle" ] && ! command -v update-ca-certificates >/dev/null; then
    mkdir -p "$own"
    cp "$bundle" "$own/machine-bundle.crt"
  fi
}
