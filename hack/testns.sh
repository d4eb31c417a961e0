#!/bin/bash
# testns.sh [-strict] COMMAND [ARG...]: run COMMAND as root in namespaces of its own, leaving nothing behind.
# The work is done by hack/testns; this builds it first (a moment when nothing has changed).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CGO_ENABLED=0 go build -C "$root" -o build/bin/testns ./hack/testns
exec "$root/build/bin/testns" "$@"
