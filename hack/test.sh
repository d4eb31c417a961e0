#!/bin/bash
# test.sh STEP...: `make test`. It runs the targets one after another and says at the end what failed, what was flaky and
# where the time went. A failed test does not end the run; a failed build does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
records=build/test
rm -f "$records"/*.json "$records"/steps.tsv
mkdir -p "$records"
for step in "$@"; do
  begin=$SECONDS code=0
  make "$step" || code=$?
  printf '%s\t%d\t%d\n' "$step" $((SECONDS - begin)) "$code" >>"$records/steps.tsv"
  case $code:$step in
    0:* | *:lint | *:test-*) ;;
    *) break ;;
  esac
done
CGO_ENABLED=0 go build -o build/bin/testreport ./hack/testreport
exec build/bin/testreport "$records"
