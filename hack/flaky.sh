#!/bin/bash
# flaky.sh N PACKAGES [FLAG...]: run tests N times with one processor and N times with two, while two busy loops take
# processor time, and list the tests that are not always green. FLAGs are those of go test, such as -run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
n=$1 packages=$2
shift 2
CGO_ENABLED=0 go build -o build/bin/testreport ./hack/testreport
CGO_ENABLED=1 go test -run '^$' -tags failpoints -race -vet=off $packages >/dev/null # builds before the load begins
loops=()
for _ in 1 2; do
  (while :; do :; done) &
  loops+=($!)
done
trap 'kill "${loops[@]}" 2>/dev/null || true' EXIT
trap : INT TERM # the table also lists the runs until an interrupt
rm -f build/test/flaky.json
status=0
# A panic ends the runs of its package, so each package's runs are counted.
CGO_ENABLED=1 hack/testns.sh -strict build/tools/gotestsum --format pkgname --hide-summary skipped,output \
  --jsonfile build/test/flaky.json --packages "$packages" -- \
  -tags failpoints -race -vet=off -timeout 2h -count "$n" -cpu 1,2 "$@" || status=$?
build/bin/testreport -runs build/test flaky.json
exit "$status" # something that no test reports, such as a process left behind
