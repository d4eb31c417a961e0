#!/bin/bash
# build.sh rebuilds wide.wasm. `make examples` installs what it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD/../../../../../..
tools=$root/build/wasm-tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$root/examples/wasm/tools/borrows.mjs" "$tools"
CGO_ENABLED=0 go run -C "$root" ./cmd/tripod wit gen "$PWD/wide.proto" >"$work/wide.wit"
cat world.wit >>"$work/wide.wit"
"$tools/node_modules/.bin/componentize-qjs" --sync --opt-size --minify --wit "$work/wide.wit" --world example:wide/app \
  --js wide.js --output wide.wasm >/dev/null
node "$tools/borrows.mjs" wide.wasm
chmod 644 wide.wasm
