#!/bin/bash
# build.sh: rebuild the .wasm files of the examples from their sources, and SHA256SUMS, which shows whether they belong
# together. It needs Go, Debian's clang-14, lld-14, wasi-libc and libclang-rt-14-dev-wasm32, and build/wasm-tools (`make
# examples` installs them).
set -euo pipefail
export LC_ALL=C # one order of names everywhere
cd "$(dirname "${BASH_SOURCE[0]}")"

for name in relay ping; do
  clang-14 --target=wasm32-wasi -O2 -Wl,--strip-all -Wall -Wextra -Werror -o "$name-c/$name.wasm" "$name-c/$name.c"
done
tools=../../build/wasm-tools
cp component.mjs "$tools/edge-component.mjs"
core=$(mktemp)
trap 'rm -f "$core"' EXIT
clang-14 --target=wasm32-wasi -O2 -Wl,--strip-all -Wall -Wextra -Werror -o "$core" relay-wit-c/relay.c
node "$tools/edge-component.mjs" module "$core" relay-wit-c/relay.wasm relay-wit-c/world.wit ../../internal/sandbox/wasm/internal/worker/channels.wit
clang-14 --target=wasm32-wasi -mexec-model=reactor -O2 -Wl,--strip-all -Wall -Wextra -Werror -o "$core" relay-messaging-c/relay.c
node "$tools/edge-component.mjs" module "$core" relay-messaging-c/relay.wasm relay-messaging-c/world.wit relay-messaging-c/messaging.wit
GOOS=wasip1 GOARCH=wasm CGO_ENABLED=0 GOFLAGS= \
  go build -C ../.. -trimpath -buildvcs=false -ldflags='-s -w -buildid=' -o "$PWD/ticker-go/ticker.wasm" ./examples/edge/ticker-go
chmod 644 ./*/*.wasm

find . -type f ! -name '*.md' ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS
