#!/bin/bash
# testns.sh [-strict] COMMAND [ARG...]: run COMMAND as root in its own namespaces and leave nothing behind.
# Builds the program hack/testns, quickly if nothing has changed, and runs it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CGO_ENABLED=0 go build -C "$root" -o build/bin/testns ./hack/testns
exec "$root/build/bin/testns" "$@"
