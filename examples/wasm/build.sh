#!/bin/bash
# build.sh: rebuild the .wasm files of the examples from their sources, and SHA256SUMS, which shows whether they belong
# together. It installs what it needs: Debian packages, and npm packages (tools/package-lock.json) into build/wasm-tools.
# The .wasm files in the repository were built this way; nothing else needs this script.
set -euo pipefail
export LC_ALL=C # one order of names everywhere
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD/../..
tools=$root/build/wasm-tools
work=$root/build/wasm
mkdir -p "$tools" "$work"

missing=()
for p in clang-14 lld-14 wasi-libc libclang-rt-14-dev-wasm32; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q ' installed$' || missing+=("$p")
done
# A node from elsewhere than Debian is fine, too.
command -v node >/dev/null || missing+=(nodejs)
command -v npm >/dev/null || missing+=(npm)
if ((${#missing[@]})); then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi
cp tools/* "$tools"
if ! cmp -s tools/package-lock.json "$tools/node_modules/.installed"; then
  # Not npm ci, because it also wants the optional packages of other platforms in the lock file.
  npm install --prefix "$tools" --no-audit --no-fund --loglevel=error
  cp tools/package-lock.json "$tools/node_modules/.installed"
fi
CGO_ENABLED=0 go build -C "$root" -o "$work/tripod" ./cmd/tripod

# wit PROTO FILE: write the WIT that a component for the services must export.
wit() {
  "$work/tripod" wit gen "$1" >"$2"
}

# c SOURCE WIT WORLD NAME: build a component in C, which implements the canonical ABI itself and uses WASI preview 1.
c() {
  local flags=(--target=wasm32-wasi -O2 -mexec-model=reactor -Wl,--strip-all -Wall -Wextra -Werror
    -Wno-unused-parameter -Wno-unused-function)
  clang-14 "${flags[@]}" -o "$work/$4.core.wasm" "$1"
  node "$tools/component.mjs" "$2" "$3" "$work/$4.core.wasm" "$4/$4.wasm"
}

wit echo-c/echo.proto "$work/echo.wit"
wit greeter/greeter.proto "$work/greeter.wit"
wit faults-c/faults.proto "$work/faults.wit"
c echo-c/echo.c "$work/echo.wit" server echo-c
c greeter-c/greeter.c "$work/greeter.wit" server greeter-c
c faults-c/faults.c "$work/faults.wit" server faults-c
c hello-http-c/hello.c hello-http-c/wasi-http.wit hello hello-http-c
c fetch-c/fetch.c fetch-c/wasi-http.wit fetch fetch-c
c sockets-c/sockets.c sockets-c/wasi-sockets.wit sockets sockets-c
c cloud-c/cloud.c cloud-c/wasi-cloud.wit cloud cloud-c
c blobs-c/blobs.c blobs-c/wasi-blobs.wit blobs blobs-c
# A snapshot of a running engine differs each time, so rebuild it only if its inputs have changed.
if ! cmp -s <(sha256sum greeter-js/* greeter/* tools/*) <(grep -E '  (greeter|greeter-js|tools)/' SHA256SUMS); then
  cat "$work/greeter.wit" greeter-js/world.wit >"$work/greeter-js.wit"
  (cd greeter-js && "$tools/node_modules/.bin/componentize-qjs" --sync --opt-size --minify \
    --wit "$work/greeter-js.wit" --world example:greeter/app --js greeter.js --output greeter-js.wasm >/dev/null)
  node "$tools/borrows.mjs" greeter-js/greeter-js.wasm
fi
# The same applies to the conformance server, whose service comes from the suite.
if ! cmp -s <(sha256sum conformance-js/* tools/*) <(grep -E '  (conformance-js|tools)/' SHA256SUMS); then
  go -C "$root/hack/connect" mod download connectrpc.com/conformance
  suite=$(go -C "$root/hack/connect" list -m -f '{{.Dir}}' connectrpc.com/conformance)/proto
  "$work/tripod" wit gen -I "$suite" "$suite/connectrpc/conformance/v1/service.proto" | cat - conformance-js/world.wit >"$work/conformance-js.wit"
  (cd conformance-js && "$tools/node_modules/.bin/componentize-qjs" --sync --opt-size --minify \
    --wit "$work/conformance-js.wit" --world example:conformance/app --js conformance.js --output conformance-js.wasm >/dev/null)
  node "$tools/borrows.mjs" conformance-js/conformance-js.wasm
fi
# A core module without a component around it.
clang-14 --target=wasm32-wasi -O2 -mexec-model=reactor -Wl,--strip-all -Wall -Wextra -Werror -Wno-unused-parameter \
  -Wno-unused-function -o raw-c/raw-c.wasm raw-c/raw-c.c
GOOS=wasip1 GOARCH=wasm CGO_ENABLED=0 GOFLAGS= \
  go build -C "$root" -trimpath -buildvcs=false -ldflags='-s -w -buildid=' -o "$PWD/command-go/command-go.wasm" ./examples/wasm/command-go
chmod 644 ./*/*.wasm

# greeter-python has no binary here, and has what its own build installs.
find . -type f ! -name '*.md' ! -name SHA256SUMS ! -path './greeter-python/*' -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS
