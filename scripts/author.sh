#!/usr/bin/env bash
# Locks, builds, runs and verifies a small program on this host, with the host's Python, in bubblewrap
# and as a plain process. The last line of the output must be the same on every host.
#
# usage: author.sh   from a clone; installs Capsule into .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --no-engine
export PATH="$PWD/.venv/bin:$PATH"
folder=$(mktemp -d "${TMPDIR:-/var/tmp}/capsule-author.XXXXXX")
trap 'rm -rf "$folder"' EXIT
export CAPSULE_CACHE=$folder/cache CAPSULE_CONFIG=$folder/config
mkdir "$folder/program"
cd "$folder/program"

# The program needs a library of Debian, so that Debian's archive is read, and seeds nothing.
cat >program.py <<'PROGRAM'
import os
import ssl
import sys

import numpy

print(sys.version_info[:2], ssl.OPENSSL_VERSION.split()[1][:2], os.urandom(4).hex())
print(numpy.random.default_rng().integers(1 << 30, size=3))
PROGRAM
cat >capsule.yaml <<'SPEC'
schema: capsule/spec/v1
name: author
image: {packages: [numpy==2.4.6], debian: [libgomp1]}
code: {}
trainer: {command: [python3.11, program.py]}
limits: {minutes: 5, memory_mb: 1_024}
SPEC

# Prints a value of the JSON document on standard input, by its path of keys.
field() {
  python3 -c 'import functools, json, sys
print(functools.reduce(dict.get, sys.argv[1:], json.load(sys.stdin)))' "$@"
}

lock=$(capsule lock --json | field lock)
image=$(capsule build --engine bwrap --json | field image config)
claims=()
for engine in bwrap process; do
  mkdir "$folder/$engine"
  claims+=("$(capsule run --engine "$engine" --output "$folder/$engine" --json | field claim_id)")
  capsule verify --engine "$engine" "$folder/$engine"/*/*.capsule.tar >&2
done
python3 --version >&2
(. /etc/os-release && echo "author: $ID ${VERSION_ID:-}, apt: $(command -v apt-get || echo none)" >&2)
echo "lock=$lock image=$image bwrap=${claims[0]} process=${claims[1]}"
