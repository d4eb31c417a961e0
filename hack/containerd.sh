#!/bin/bash
# containerd.sh: build containerd's daemon and shim from the Go module proxy into a cache outside the tree, unless they exist,
# and print the cache's directory. The version is that of the containerd library in go.mod, so the peer is as new as the library.
#
# The cache is TRIPOD_CONTAINERD_CACHE (/var/cache/tripod/containerd), with a directory per version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

module=github.com/containerd/containerd/v2
programs=(containerd containerd-shim-runc-v2)
version=$(go list -m -f '{{.Version}}' "$module")
cache=${TRIPOD_CONTAINERD_CACHE:-/var/cache/tripod/containerd}/${version#v}

# Build in a directory beside, so that an interrupted build leaves no seemingly complete program.
build() {
  local draft
  draft=$(mktemp -d "$cache/.build-XXXXXX")
  echo "containerd: building $1 $version into $cache (once, some minutes on two cores)" >&2
  # "go install" of a version takes the dependencies that containerd itself pins, not ours.
  GOBIN=$draft GOFLAGS='' CGO_ENABLED=0 nice go install -trimpath -tags no_btrfs,no_zfs,no_aufs,no_devmapper \
    -ldflags "-s -w -X $module/version.Version=$version" "$module/cmd/$1@$version"
  mv "$draft/$1" "$cache/$1"
  rmdir "$draft"
}

mkdir -p "$cache"
for p in "${programs[@]}"; do [ -x "$cache/$p" ] || build "$p"; done
echo "$cache"
