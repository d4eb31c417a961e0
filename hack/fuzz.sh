#!/bin/bash
# fuzz.sh [TIME] [PATTERN]: run every fuzz target, or those that match PATTERN, for TIME each (20s).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CGO_ENABLED=1 # for the Wasm engine
time=${1:-20s} pattern=${2:-.}
found=0
while IFS=: read -r file name; do
  [[ $name =~ $pattern ]] || continue
  found=1
  echo "== $name in $(dirname "$file")"
  hack/testns.sh go test -run '^$' -fuzz "^$name\$" -fuzztime "$time" "./$(dirname "$file")"
done < <(grep -rHoE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' cmd internal test | sed 's/:func /:/' | sort)
[ $found = 1 ] || { echo "fuzz: no target matches $pattern" >&2; exit 1; }
