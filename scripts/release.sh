#!/usr/bin/env bash
# Release the version that capsule/__init__.py states.
#
#   bash scripts/release.sh build OUT            build both wheels, the one with native parts and the one
#                                                for every platform, and the sdist in two folders, and
#                                                the wheels from the sdist in a third, and compare
#   bash scripts/release.sh prepare KEY.pub      list this version in images/releases.json and the
#                                                key in KEYS; commit both
#   bash scripts/release.sh release OUT KEY      check everything, test, build, sign with KEY, and tag
#   bash scripts/release.sh sign OUT KEY         check everything and that a key in KEYS signed the tag
#                                                of this commit; build, and sign with KEY
#
# KEY is the project's private SSH key (ssh-keygen -t ed25519), which is never in the repository. KEYS
# contains its public half, in the form of allowed_signers (ssh-keygen(1)) with the principal
# release@capsule-rl.dev. Nothing is uploaded or pushed; the last lines of release describe the next steps.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
principal=release@capsule-rl.dev
namespace=capsule-release@capsule-rl.dev

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() { echo "release: $*" >&2; exit 1; }
command -v "$python" >/dev/null ||
  fail "$python does not exist; run: bash scripts/setup.sh --no-engine train dev"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' capsule/__init__.py)

# build_in FOLDER TARGET [OPTION ...]: build the tar archive on standard input in FOLDER, with empty caches
build_in() {
  local folder=$1 target=$2
  shift 2
  mkdir -p "$folder" "$target"
  tar -x -C "$folder" --strip-components 1
  # All builds have the same umask and time zone, and the epoch replaces the times of files.
  (cd "$folder" && umask 022 && export TZ=UTC LC_ALL=C.UTF-8 SOURCE_DATE_EPOCH=$epoch &&
    "$tool" -m hatchling build -d "$target" "$@" &&
    CAPSULE_WHEEL=pure "$tool" -m hatchling build -d "$target" -t wheel) >/dev/null
}

commit=$(git rev-parse HEAD) # tests and builds take long, and HEAD may change meanwhile

# build OUT: builds in folders of different names and depths, which must be equal
build() {
  local out=$1
  epoch=$(git log -1 --format=%ct "$commit")
  mkdir -p "$out"
  out=$(cd "$out" && pwd)
  tool=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
  git archive --prefix=checkout/ "$commit" | build_in "$scratch/one" "$scratch/first"
  git archive --prefix=checkout/ "$commit" | build_in "$scratch/another/place" "$scratch/second"
  gzip -cd "$scratch"/first/*.tar.gz | build_in "$scratch/sdist" "$scratch/third" -t wheel
  (cd "$scratch/first" && sha256sum -- *) > "$scratch/SHA256SUMS"
  (cd "$scratch/second" && sha256sum --strict --quiet -c "$scratch/SHA256SUMS") ||
    fail "two builds of one commit differ"
  (cd "$scratch/third" && sha256sum -- *.whl) > "$scratch/WHEELS"
  (cd "$scratch/first" && sha256sum --strict --quiet -c "$scratch/WHEELS") ||
    fail "the sdist gives another wheel"
  cp "$scratch"/first/* "$scratch/SHA256SUMS" "$out"
  echo "built twice, and the wheels from the sdist, with equal bytes:"
  cat "$out/SHA256SUMS"
}

prepare() {
  "$python" hatch_build.py
  "$python" scripts/record_release.py
  local line
  line="$principal namespaces=\"$namespace,git\" $(cut -d ' ' -f 1,2 "$1")"
  grep -qxF "$line" KEYS 2>/dev/null || echo "$line" >> KEYS
}

check() {
  [ -z "$(git status --porcelain)" ] || fail "the tree has changes; commit or remove them"
  grep -q "^## $version - [0-9]\{4\}-[0-9][0-9]-[0-9][0-9]$" CHANGELOG.md ||
    fail "CHANGELOG.md has no section '## $version - YYYY-MM-DD'"
  grep -q "^version: $version$" CITATION.cff || fail "CITATION.cff states another version"
  "$python" scripts/record_release.py --check ||
    fail "images/releases.json does not list $version as it is: bash scripts/release.sh prepare"
  grep -q "^$principal " KEYS 2>/dev/null || fail "KEYS has no line for $principal"
}

# sign OUT KEY: build, and sign the digests
sign() {
  local out=$1 key=$2
  build "$out"
  # The digest in the list covers the native parts of this folder; those of the wheel must be equal.
  "$python" -m zipfile -e "$out/capsule_rl-$version"-*_x86_64.whl "$scratch/wheel"
  diff -r capsule/native/lib "$scratch/wheel/capsule/native/lib" ||
    fail "the wheel has other native parts"
  # The signature is checked with KEYS at once, so that KEY must be one of the listed keys.
  rm -f "$out/SHA256SUMS.sig"
  ssh-keygen -q -Y sign -f "$key" -n "$namespace" "$out/SHA256SUMS"
  ssh-keygen -Y verify -f KEYS -I "$principal" -n "$namespace" -s "$out/SHA256SUMS.sig" \
    < "$out/SHA256SUMS" || fail "the key is not the one in KEYS"
}

release() {
  local out=$1 key=$2
  git rev-parse -q --verify "refs/tags/v$version" >/dev/null && fail "the tag v$version exists"
  check
  bash tests/run.sh
  [ "$(git rev-parse HEAD)" = "$commit" ] && [ -z "$(git status --porcelain)" ] ||
    fail "the tree is no longer that of $commit, which was to be tested"
  sign "$out" "$key"
  git -c gpg.format=ssh -c user.signingKey="$key" \
    tag -s "v$version" -m "Capsule $version" "$commit"
  echo "Now: git push origin v$version, after which .github/workflows/release.yml publishes the files;"
  echo "set the next version, as in 0.2.0.dev0, in capsule/__init__.py, and begin '## Unreleased' in"
  echo "CHANGELOG.md."
}

sign_tagged() {
  [ "$(git rev-parse -q --verify "v$version^{commit}")" = "$(git rev-parse HEAD)" ] ||
    fail "the tag v$version does not exist, or is of another commit"
  check
  git -c gpg.ssh.allowedSignersFile=KEYS verify-tag "v$version" ||
    fail "no key in KEYS signed the tag v$version"
  sign "$1" "$2"
}

case ${1:-} in
  build) [ $# -eq 2 ] || fail "usage: release.sh build OUT"; build "$2" ;;
  prepare) [ $# -eq 2 ] || fail "usage: release.sh prepare KEY.pub"; prepare "$2" ;;
  release) [ $# -eq 3 ] || fail "usage: release.sh release OUT KEY"; release "$2" "$3" ;;
  sign) [ $# -eq 3 ] || fail "usage: release.sh sign OUT KEY"; sign_tagged "$2" "$3" ;;
  *) fail "usage: release.sh build OUT | prepare KEY.pub | release OUT KEY | sign OUT KEY" ;;
esac
