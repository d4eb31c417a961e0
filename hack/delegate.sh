#!/bin/bash
# delegate.sh: run the end-to-end tests of Linux pods through a Tripod that delegates the default handler to containerd, except those
# that test/e2e/testdata/delegate.txt names. containerd's programs are in $TRIPOD_TEST_DELEGATE; by default hack/containerd.sh
# builds them, and /usr/bin means Debian's. Arguments go to `go test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export TRIPOD_TEST_DELEGATE=${TRIPOD_TEST_DELEGATE:-$(hack/containerd.sh)}

# quoted: escape what is special in a regular expression, and anchor each part of a test's name.
quoted() { sed -E 's/[][().*+?{}|^$\\]/\\&/g; s:/:$/^:; s/.*/^&$/'; }

files=$(ls test/e2e/*_test.go | grep -vE '/(vm|wasm|edge|main)_')
# shellcheck disable=SC2086 # names of files without spaces
tests=$(sed -nE 's/^func (Test[A-Za-z0-9_]*)\(t \*testing\.T\).*/\1/p' $files | quoted | paste -sd '|')
left_out=$(grep -v '^#' test/e2e/testdata/delegate.txt | cut -f 1 | quoted | paste -sd '|')
exec go test -count=1 -timeout 60m -run "$tests" -skip "$left_out" "$@" ./test/e2e
