#!/bin/bash
# serve.sh [check]: build in build/serve what `hack/bench.sh serve` compares with: the CLI of wasmtime, in the version of the engine
# (20 min), and components of wasi:http in JavaScript and Python (hack/serve), as a maker builds them, with componentize-js and
# componentize-py. What is there already is not built again. It needs Rust, and what `hack/setup.sh serve` installs.
# With check, it builds nothing and reports whether everything is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=$PWD/build/serve
componentize_py=0.25.1
say() { printf 'serve: %s\n' "$*" >&2; }

mkdir -p "$out"
version=$(sed -n '/^name = "wasmtime-c-api-impl"/,/^version/ s/^version = "\(.*\)"/\1/p' internal/component/engine/wasmtime/Cargo.lock)
built=$("$out/bin/wasmtime" --version 2>/dev/null | cut -d ' ' -f 2) || true
if [ "${1-}" = check ]; then
  [ "$built" = "$version" ] && [ -f "$out/hello-js.wasm" ] && [ -f "$out/hello-py.wasm" ] && command -v wrk >/dev/null
  exit
fi
if [ "$built" != "$version" ]; then
  say "wasmtime $version"
  CARGO_TARGET_DIR=$out/target cargo install --quiet --locked --root "$out" --version "$version" wasmtime-cli
  rm -rf "$out/target"
fi

# stale LANGUAGE: the component must be built, because there is none or something in the project is newer.
stale() { [ -z "$(find "$out/hello-$1.wasm" -newer hack/serve.sh 2>/dev/null)" ] || [ -n "$(find hack/serve -newer "$out/hello-$1.wasm" -type f)" ]; }

if stale js; then
  say "hello-js.wasm"
  install -m 644 hack/serve/{package.json,package-lock.json,build.mjs} "$out"
  npm ci --prefix "$out" --silent --no-audit --no-fund
  # The WIT of wasi:http comes with jco; componentize-js knows an earlier version of the same interfaces.
  rm -rf "$out/wit"
  mkdir -p "$out/wit/deps"
  cp -r "$out"/node_modules/@bytecodealliance/jco/lib/wit/builtin/0.2.12/* "$out/wit/deps"
  install -m 644 hack/serve/world.wit "$out/wit"
  find "$out/wit/deps" -name '*.wit' -exec sed -i 's/@0\.2\.12/@0.2.10/g' {} +
  node "$out/build.mjs" hack/serve/hello.js "$out/wit" "$out/hello-js.wasm"
fi

if stale py; then
  say "hello-py.wasm"
  install -D -m 644 hack/serve/app.py "$out/app/app.py" # the tool writes beside it
  python3 -m venv "$out/python"
  "$out/python/bin/pip" install --quiet --disable-pip-version-check "componentize-py==$componentize_py"
  "$out/python/bin/componentize-py" --wit-path "$out/wit" --world hello componentize --python-path "$out/app" --output "$out/hello-py.wasm" app
fi
