#!/usr/bin/env bash
# Runs the tests of the native parts against builds with sanitizers, in a copy of this checkout.
#
#   launcher with supervisor, enclose   AddressSanitizer, UndefinedBehaviorSanitizer
#   kernels                             both; the tests' Python preloads AddressSanitizer's library
#   interposer, maths                   UndefinedBehaviorSanitizer, because they are preloaded themselves
#
# AddressSanitizer does not support the interposer, in either order of preloading. If the runtime of
# AddressSanitizer comes first, as it requires, every program hangs before main: while the runtime
# initializes itself, it calls the interposer's sysconf, which attaches to the run before it answers.
# Attaching calls the runtime's strcat, which waits until the runtime is initialized. If the interposer
# comes first and the runtime's check of the order is switched off, the runtime reports writes in execve
# and posix_spawn that are inside their arrays.
#
# Leaks are not reported, because a launcher ends with its run and does not free its memory before. A
# finding ends the process in which it occurs, and so its test. As root, the script installs missing
# Debian packages.
#
# usage: sanitize.sh [pytest arguments]      without any, all tests below
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .cache
copy=$PWD/.cache/sanitized python=$PWD/.venv/bin/python
version=19 # of clang; the kernels need 17 or newer

if ! command -v "clang-$version" >/dev/null; then
  # shellcheck source=scripts/packages.sh
  source scripts/packages.sh
  install_debian_packages "clang-$version" "libclang-rt-$version-dev"
fi

rm -rf "$copy"
mkdir "$copy"
cp -r capsule tests images specs examples docs pyproject.toml hatch_build.py "$copy"
mkdir "$copy/.cache"
ln -s "$PWD/.cache/zig" "$copy/.cache/zig" # what compiling the tests' programs needs

sources() {
  PYTHONPATH=. "$python" -c 'import sys, hatch_build; print(*hatch_build.PARTS[sys.argv[1]][0])' "$1"
}
# The kernel headers that the release build uses; Debian's are older.
headers=$("$python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent)')
headers=$headers/lib/libc/include
# build PART FLAGS...: from the sources of the release, with the flags that change results.
build() {
  local part=$1 files
  shift
  read -ra files < <(sources "$part")
  (cd capsule/native/source &&
    "clang-$version" -O1 -g -std=c17 -D_GNU_SOURCE= -fno-omit-frame-pointer -ffp-contract=off \
      -fno-math-errno -fno-sanitize-recover=all -isystem "$headers/x86-linux-any" \
      -isystem "$headers/any-linux-any" "$@" "${files[@]}" -o "$copy/capsule/native/lib/$part")
}
both=-fsanitize=address,undefined
library=(-shared -fPIC -fvisibility=hidden)
undefined=(-fsanitize=undefined -fsanitize-minimal-runtime -ftls-model=initial-exec)
# This option also applies to programs that the tests start with other environment variables.
options=$copy/.cache/options.c
printf 'const char *__asan_default_options(void) { return "detect_leaks=0"; }\n' >"$options"
build capsule-launch "$both" "$options"
build capsule-enclose "$both" "$options"
build libcapsule-kernels.so "$both" -shared-libasan "${library[@]}"
build libcapsule-entropy.so "${undefined[@]}" "${library[@]}" -ldl -lpthread
build libcapsule-math.so "${undefined[@]}" "${library[@]}" -lm

export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
runtime=$("clang-$version" -print-file-name=libclang_rt.asan-x86_64.so)
cd "$copy"
export PYTHONPATH=$copy # before the checkout that is installed in .venv
found=$("$python" -c 'from capsule.native import FOLDER; print(FOLDER)')
[ "$found" = "$copy/capsule/native/lib" ] || { echo "sanitize: $found would be tested" >&2; exit 1; }
tests=("$python" -m pytest -q -m "not gpu and not emulated and not soak")
if [ $# -gt 0 ]; then
  "${tests[@]}" "$@"
  exit
fi
# Not tests/engine/test_seccomp.py: its container has no C library, which these builds need.
"${tests[@]}" tests/entropy tests/engine/test_supervise.py tests/engine/test_enclose.py
LD_PRELOAD=$runtime "${tests[@]}" tests/training/layers tests/training/optimizers
