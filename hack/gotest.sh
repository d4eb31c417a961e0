#!/bin/bash
# gotest.sh STEP[.PART] PACKAGES [FLAG...]: `go test` for make. It runs failed tests once more, each alone, and says which
# are flaky (docs/testing.md, "A test that is red by chance"). The record is build/test/STEP.PART.json. PACKAGES is one
# word with spaces; GOTESTSUM has further flags of gotestsum.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=$1 packages=$2
shift 2
records=$root/build/test
mkdir -p "$records"
CGO_ENABLED=0 go build -C "$root" -o build/bin/testreport ./hack/testreport
# Only failures of a few tests are chance. A panic ends gotestsum, because tests after it did not run.
again=(--rerun-fails=1 --rerun-fails-max-failures=3 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race)
code=0
# shellcheck disable=SC2086 # several flags
"$root/build/tools/gotestsum" --format pkgname --hide-summary skipped --jsonfile "$records/$name.json" \
  "${again[@]}" ${GOTESTSUM-} --packages "$packages" -- "$@" || code=$?
"$root/build/bin/testreport" "$records" "$name.json" || code=1
exit "$code"
