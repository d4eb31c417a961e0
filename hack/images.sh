#!/bin/bash
# images.sh [build | list | serve ADDR | push ADDR | hosts ADDR DIR]: the container images of the tests and the demo.
# Builds the program hack/images (see its doc.go) and runs it in the root of the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CGO_ENABLED=0 go build -o build/bin/images ./hack/images
case ${1-} in list | serve | push) build/bin/images build ;; esac
exec build/bin/images "$@"
