#!/bin/bash
# release_test.sh: build a release in this tree and in a clone of its commit elsewhere, and compare the bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -z "$(git status --porcelain --untracked-files=no)" ] || { echo "release_test: commit first; a clone has only what is committed" >&2; exit 1; }
clone=$(mktemp -d /var/tmp/tripod-release.XXXXXX)
trap 'rm -rf "$clone"' EXIT
git clone --quiet . "$clone/elsewhere/tripod"
make release
make -C "$clone/elsewhere/tripod" release
cmp build/release/SHA256SUMS "$clone/elsewhere/tripod/build/release/SHA256SUMS"
echo "release_test: both releases have the same bytes"
