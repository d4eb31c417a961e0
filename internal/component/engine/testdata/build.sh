#!/bin/bash
# build.sh: rebuilds the guests of the engine's tests. `make examples` installs what it needs (clang-14, wasi-libc, jco).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools=../../../../build/wasm-tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(--target=wasm32-wasi -O2 -Wl,--strip-all -Wall -Wextra -Wno-infinite-recursion)
clang-14 "${flags[@]}" -mexec-model=reactor -mreference-types -Wl,--growable-table -o "$work/guest.wasm" guest.c
node "$tools/component.mjs" guest.wit guest "$work/guest.wasm" guest.wasm
clang-14 "${flags[@]}" -o command.wasm command.c
"$tools/node_modules/.bin/jco" parse twice.wat -o "$work/twice.wasm" >/dev/null
"$tools/node_modules/.bin/jco" new --wasi-command "$work/twice.wasm" -o twice.wasm >/dev/null
for guest in parts order; do "$tools/node_modules/.bin/jco" parse $guest.wat -o $guest.wasm >/dev/null; done
clang-14 "${flags[@]}" -o channels.wasm channels.c
clang-14 "${flags[@]}" -Wl,--stack-first -Wl,-z,stack-size=1048576 -o chaos.wasm chaos.c
