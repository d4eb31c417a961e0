#!/bin/bash
# images.sh [build | list | serve ADDR | push ADDR | hosts ADDR DIR]: the container images of the tests and the demo.
# The work is done by hack/images (its doc.go says more); this builds it first and runs it in the root of the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CGO_ENABLED=0 go build -o build/bin/images ./hack/images
case ${1-} in list | serve | push) build/bin/images build ;; esac
exec build/bin/images "$@"
