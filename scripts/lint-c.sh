#!/usr/bin/env bash
# Checks the C sources: their format with clang-format, and the programs with clang-tidy (.clang-tidy).
#
# usage: lint-c.sh [--fix]      --fix formats the files instead of checking them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

format=(--dry-run -Werror)
if [ "${1:-}" = --fix ]; then format=(-i); fi
find capsule/native/source tests -name '*.[ch]' -print0 | xargs -0 clang-format "${format[@]}"
if [ "${1:-}" = --fix ]; then exit; fi

PYTHONPATH=. python scripts/compile_commands.py
# The programs of the tests are excluded, because they contain discouraged code on purpose.
find capsule/native/source -name '*.c' -print0 |
  xargs -0 --max-args=4 --max-procs="$(nproc)" clang-tidy --quiet -p .cache
