#!/usr/bin/env bash
# This script shows Capsule from start to end: it builds an image for DQN on Atari Breakout, trains,
# signs the bundle and verifies it. Then an agent learns the game Catch in a few seconds, and the
# script makes a picture of it. It prints every command as you would type it. You can interrupt and
# repeat the script: it keeps everything that was fetched or built, and resumes an interrupted run.
#
# usage: bash examples/breakout.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

spec=specs/dqn-breakout-small.yaml
key=.cache/demo.key
runs=runs

step() {
  printf '\n$ %s\n' "$*" >&2
  "$@"
}

[ -e "$key" ] || step capsule keygen "$key"
step capsule build "$spec"

# A run directory with a state and without a bundle belongs to an interrupted run.
unfinished=
for directory in "$runs"/dqn-breakout-small-*/; do
  if [ -d "$directory/work/state" ] && ! compgen -G "$directory/*.capsule.tar" >/dev/null; then
    unfinished=${directory%/}
  fi
done
if [ -n "$unfinished" ]; then
  step capsule run --resume "$unfinished" --key "$key"
else
  step capsule run "$spec" --key "$key" --output "$runs"
fi

bundles=("$runs"/dqn-breakout-small-*/*.capsule.tar)
bundle=${bundles[-1]}
# The code of a bundle runs without a container only with this option. Here, the code is your own.
where=()
if tar -xOf "$bundle" claims.json | grep -qF '"engine=process"'; then where=(--engine process); fi
step capsule verify "$bundle" --key "$key.pub" "${where[@]}"

step capsule run specs/impala-catch.yaml --key "$key" --output "$runs"
bundles=("$runs"/impala-catch-*/*.capsule.tar)
step capsule replay "${bundles[-1]}" --key "$key.pub" "${where[@]}" --output "$runs/catch.gif"
