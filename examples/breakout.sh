#!/usr/bin/env bash
# The main job, start to end: DQN on Atari Breakout becomes an image, a run, a signed bundle and a
# verdict. Then an agent that a few seconds are enough for learns Catch, and a picture of it is made.
# Every command is shown as you would type it. May be interrupted and repeated: whatever
# was fetched or built stays, and a run that was cut short is continued.
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

# A run directory with state and without a bundle was cut short.
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
# A bundle's code runs without a container only if the command says so. This code is your own.
where=()
if tar -xOf "$bundle" claims.json | grep -qF '"engine=process"'; then where=(--engine process); fi
step capsule verify "$bundle" --key "$key.pub" "${where[@]}"

step capsule run specs/impala-catch.yaml --key "$key" --output "$runs"
bundles=("$runs"/impala-catch-*/*.capsule.tar)
step capsule replay "${bundles[-1]}" --key "$key.pub" "${where[@]}" --output "$runs/catch.gif"
