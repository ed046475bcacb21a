#!/usr/bin/env bash
# Fetches Debian 13's static qemu-user, whatever Debian this is, and prints where qemu-x86_64 lies.
#
# From the mirror that apt is configured for, through apt, which checks signatures. Nothing is
# installed: the one program is unpacked into the folder given.
#
# usage: fetch-qemu.sh FOLDER
set -euo pipefail
mkdir -p "$1"
cd "$1"
if [ ! -x qemu-x86_64 ]; then
  # shellcheck disable=SC2016 # apt replaces $(SITE)
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' \
    'Label: Debian' | sort -u | head -n 1)
  [ -n "$mirror" ] || { echo "apt knows no Debian mirror; run 'apt-get update'" >&2; exit 1; }
  mkdir -p lists/partial cache/archives/partial
  keys=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$keys] $mirror trixie main" >sources.list
  options=(-qq -o "Dir::Etc::SourceList=$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" -o APT::Sandbox::User="$(id -un)")
  apt-get "${options[@]}" update >&2
  apt-get "${options[@]}" download qemu-user >&2
  dpkg-deb --fsys-tarfile qemu-user_*.deb | tar -xO ./usr/bin/qemu-x86_64 >unfinished
  chmod +x unfinished
  mv unfinished qemu-x86_64
  rm -rf lists cache sources.list ./*.deb
fi
echo "$PWD/qemu-x86_64"
