#!/bin/bash
# deb.sh: build build/release/tripod_VERSION_ARCH.deb. The files of a commit are always the same bytes: times are the
# commit's, owners are root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${VERSION:?}"
# For Debian a development version comes before the release.
version=${VERSION/-/\~}
arch=$(dpkg --print-architecture)
package=build/release/tripod_${version}_$arch.deb
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

root=build/deb
rm -rf "$root" && mkdir -p "$root/DEBIAN" build/release
make install VERSION="$VERSION" BUILDFLAGS='-trimpath -buildvcs=false' LINKFLAGS=-buildid= DESTDIR="$root" PREFIX=/usr UNITDIR=/lib/systemd/system

# The configuration has every key, commented out, so that an upgrade can change a default.
install -d "$root/etc/tripod"
"$root/usr/bin/tripod" config default | sed -E 's/^([^#])/#\1/' >"$root/etc/tripod/config.toml"

install -D -m 0644 dist/needrestart.conf "$root/etc/needrestart/conf.d/tripod.conf"

doc=$root/usr/share/doc/tripod
install -D -m 0644 -t "$doc" dist/debian/copyright README.md SECURITY.md
gzip -9n <CHANGELOG.md >"$doc/changelog.gz"
gzip -9n "$root"/usr/share/man/man1/*
hack/engine.sh crates >build/crates
go run ./hack/licenses "$doc/licenses" "$root"/usr/bin/* <build/crates

# dpkg-shlibdeps finds out which version of libc the worker needs, and insists on a debian/control.
mkdir -p build/shlibs/debian
printf 'Source: tripod\n\nPackage: tripod\nArchitecture: any\n' >build/shlibs/debian/control
shlibs=$(cd build/shlibs && dpkg-shlibdeps -O "../deb/usr/bin/tripod-wasm" | sed -n 's/^shlibs:Depends=//p')
rm -rf build/shlibs

install -m 0755 -t "$root/DEBIAN" dist/debian/postinst dist/debian/prerm dist/debian/postrm
install -m 0644 -t "$root/DEBIAN" dist/debian/conffiles
sed -e "s|@VERSION@|$version|" -e "s|@ARCH@|$arch|" -e "s|@SHLIBS@|$shlibs|" -e "s|@SIZE@|$(du -sk --apparent-size "$root" | cut -f1)|" \
  dist/debian/control.in >"$root/DEBIAN/control"
(cd "$root" && find . -type f -not -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group --build "$root" "$package"
rm -rf "$root"
