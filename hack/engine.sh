#!/bin/bash
# engine.sh         make build/engine, which has wasmtime as a static library (lib) and its C headers (include)
# engine.sh check   fail with what to install, unless Rust is recent enough
# engine.sh fetch   download the crates, so that the build needs no network
# engine.sh update  take the newest version of wasmtime's line, in the crate and in the changelog
# engine.sh crates  print what is linked into the library: name, version, license and directory of each crate, with tabs
#
# The crate internal/component/engine/wasmtime says which version and features. It is built once, into
# ${XDG_CACHE_HOME:-~/.cache}/tripod/engine/HASH, where other checkouts find it; build/engine is a link to that directory. An
# interrupted build goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
crate=internal/component/engine/wasmtime
: "${HOME:=$(getent passwd "$(id -u)" | cut -d: -f6)}"
: "${CARGO_HOME:=$HOME/.cargo}"
export HOME CARGO_HOME
PATH=$CARGO_HOME/bin:$PATH

say()  { printf 'engine: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

version() { sed -n '/^name = "wasmtime"$/{n;s/^version = "\(.*\)"$/\1/p}' "$crate/Cargo.lock"; }

want=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$crate/Cargo.toml")
rust=$(rustc -vV 2>/dev/null && cargo -V) || fail "Rust $want or later is needed, and rustc and cargo are not in PATH; see https://rustup.rs (Debian 12 has an older one)"
has=$(sed -n 's/^release: //p' <<<"$rust") host=$(sed -n 's/^host: //p' <<<"$rust")
sort -CV <<<"$want"$'\n'"$has" || fail "Rust $want or later is needed, and $(command -v rustc) is $has; see https://rustup.rs"
manifest=(--manifest-path "$crate/Cargo.toml" --locked)

case ${1-} in
  '') ;;
  check) exit ;;
  fetch) exec cargo fetch --quiet "${manifest[@]}" --target "$host" ;;
  crates)
    cargo metadata "${manifest[@]}" --filter-platform "$host" --format-version 1 |
      jq -r '.packages[] | [.name, .version, .license // "", (.manifest_path | rtrimstr("/Cargo.toml"))] | @tsv' |
      awk -F '\t' 'NR == FNR {linked[$1]; next} $1 " v" $2 in linked' \
        <(cargo tree "${manifest[@]}" --target "$host" --edges normal,no-proc-macro --prefix none --format '{p}' | cut -d' ' -f1,2 | sort -u) - |
      grep -v '^tripod-engine' | sort
    printf 'std\t%s\tMIT OR Apache-2.0\t%s/share/doc/rust\n' "$has" "$(rustc --print sysroot)"
    exit
    ;;
  update)
    was=$(version)
    cargo update --manifest-path "$crate/Cargo.toml" wasmtime-c-api-impl
    [ "$(version)" != "$was" ] || { say "wasmtime $was is the newest of its line"; exit; }
    sed -i "/^## Unreleased/,/^## [^U]/s/wasmtime ${was//./\\.}/wasmtime $(version)/" CHANGELOG.md
    say "wasmtime $(version) instead of $was: the crate and CHANGELOG.md are changed"
    exit
    ;;
  *) fail "unknown argument $1" ;;
esac
[ "$(go env GOARCH)" = "$(go env GOHOSTARCH)" ] || fail "the engine is built for this machine ($host) only: build for $(go env GOARCH) on such a machine"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tripod/engine
hash=$({ cat "$crate/Cargo.toml" "$crate/Cargo.lock" "$crate/lib.rs"; echo "$rust"; } | sha256sum | cut -c1-16)
mkdir -p "$cache" build
exec 9>"$cache/lock"
flock -n 9 || { say 'waiting for the build of another checkout'; flock 9; }
if [ ! -e "$cache/$hash" ]; then
  say "building wasmtime $(version), once: about 5 minutes on two cores"
  # Only the crate says how it is built. Paths of sources do not depend on the home directory, so that a release's bytes do not.
  for v in $(compgen -e); do
    [[ $v != CARGO_* && $v != RUSTC* && $v != RUSTFLAGS ]] || [ "$v" = CARGO_HOME ] || unset "$v"
  done
  target=$cache/target-$hash
  CARGO_ENCODED_RUSTFLAGS=--remap-path-prefix=$CARGO_HOME=/cargo$'\x1f'--remap-path-prefix=$target=/engine
  export CARGO_ENCODED_RUSTFLAGS
  build=(cargo build "${manifest[@]}" --release --target "$host" --target-dir "$target")
  if [ -t 2 ]; then
    "${build[@]}" 9>&- # which shows its progress
  else
    hack/patience.sh engine "${build[@]}" 2>"$cache/log" 9>&- || { tail -n 40 "$cache/log" >&2; fail "cargo failed; $cache/log has everything"; }
  fi
  rm -rf "$cache"/new.*
  new=$(mktemp -d "$cache/new.XXXXXX")
  trap 'rm -rf "$new"' EXIT
  mkdir "$new/lib"
  cp "$target/$host/release/libwasmtime.a" "$new/lib"
  ! grep -qF "$CARGO_HOME/" "$new/lib/libwasmtime.a" && ! grep -qF "$target" "$new/lib/libwasmtime.a" || fail "the library has paths of this machine"
  cp -r "$target/$host"/release/build/wasmtime-c-api-impl-*/out/include "$new"
  chmod 755 "$new"
  mv "$new" "$cache/$hash"
  rm -rf "$cache"/target-*
  find "$cache" -mindepth 1 -maxdepth 1 -type d -mtime +90 -exec rm -rf {} + # libraries that no checkout has used for that long
fi
touch "$cache/$hash"
ln -sfn "$cache/$hash" build/engine
