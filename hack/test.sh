#!/bin/bash
# test.sh STEP...: `make test`. It runs the targets one after another and says at the end what failed, what was flaky and
# where the time went. A failed test does not end the run; a failed build does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
records=build/test
rm -f "$records"/*.json "$records"/{steps.tsv,time}
mkdir -p "$records"
TIMEFORMAT='%0R %0U %0S' # seconds by the clock, of processor time, and of it in the kernel
for step in "$@"; do
  code=0
  { time make "$step" 2>&3; } 3>&2 2>"$records/time" || code=$?
  read -r clock user system <"$records/time"
  printf '%s\t%d\t%d\t%d\n' "$step" "$clock" $((user + system)) "$code" >>"$records/steps.tsv"
  case $code:$step in
    0:* | *:lint | *:test-*) ;;
    *) break ;;
  esac
done
CGO_ENABLED=0 go build -o build/bin/testreport ./hack/testreport
exec build/bin/testreport "$records"
