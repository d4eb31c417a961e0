#!/bin/bash
# release.sh: build/release has everything of VERSION: an archive of the programs and units, a Debian package, the licenses
# of what is linked, an SBOM (CycloneDX), the notes, and SHA256SUMS of them all. Two clones of a commit give the same bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${VERSION:?}"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf build/release && mkdir -p build/release
# The notes come first: a version that the changelog does not know is not built.
hack/notes.sh "$VERSION" >build/release/NOTES.md

name=tripod-$VERSION-linux-$(go env GOARCH)
root=build/release/root
make install VERSION="$VERSION" BUILDFLAGS='-trimpath -buildvcs=false' LINKFLAGS=-buildid= DESTDIR="$root"
install -m 0644 LICENSE CHANGELOG.md "$root"
hack/engine.sh crates >build/crates
go run ./hack/licenses "$root/licenses" "$root"/usr/local/bin/* <build/crates
chmod -R u=rwX,go=rX "$root"
tar -C "$root" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -c . | gzip -9n >"build/release/$name.tar.gz"

# syft finds the Go modules in the programs; the engine's crates are added. Two of the SBOM's fields differ in each run, both of them optional, and the names of files are absolute.
make build/tools/syft
SYFT_CHECK_FOR_APP_UPDATE=false SYFT_GOLANG_SEARCH_LOCAL_MOD_CACHE_LICENSES=true build/tools/syft scan --quiet "dir:$root/usr/local/bin" \
  --source-name tripod --source-version "$VERSION" -o cyclonedx-json |
  jq -S --arg root "$PWD/$root" --rawfile crates build/crates 'del(.serialNumber, .metadata.timestamp) | .components[].name |= ltrimstr($root) |
    .components += [$crates | rtrimstr("\n") | split("\n")[] | split("\t") |
      {type: "library", name: .[0], version: .[1], purl: "pkg:cargo/\(.[0])@\(.[1])", "bom-ref": "pkg:cargo/\(.[0])@\(.[1])", licenses: [{expression: (.[2] | gsub(" */ *"; " OR "))}]}]' >"build/release/$name.cdx.json"
rm -rf "$root"

VERSION="$VERSION" hack/deb.sh
(cd build/release && sha256sum -- * >SHA256SUMS)
cat build/release/SHA256SUMS
