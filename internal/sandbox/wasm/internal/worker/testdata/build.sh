#!/bin/bash
# build.sh rebuilds relay.wasm, which is examples/edge/relay-wit-c with a world that needs the engine's component path,
# and raw-faults.wasm and snapshot.wasm.
# `make examples` installs what it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools=../../../../../../build/wasm-tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp ../../../../../../examples/edge/component.mjs "$tools/edge-component.mjs"
clang-14 --target=wasm32-wasi -O2 -mexec-model=reactor -DREACTOR -Wl,--strip-all -Wall -Wextra -Werror \
  -o "$work/relay.wasm" ../../../../../../examples/edge/relay-wit-c/relay.c
node "$tools/edge-component.mjs" module "$work/relay.wasm" relay.wasm run.wit ../channels.wit cli.wit
for guest in raw-faults snapshot; do
  clang-14 --target=wasm32-wasi -O2 -mexec-model=reactor -Wl,--strip-all -Wall -Wextra -Werror -Wno-unused-parameter \
    -Wno-unused-function -o $guest.wasm $guest.c
  chmod 644 $guest.wasm
done
