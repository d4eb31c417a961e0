#!/bin/bash
# databases.sh: the root of Debian's PostgreSQL and Redis, as the tests of test/debian run them in a machine, into
# build/images/databases/root: unpacked packages, not installed, in which no maintainer script has run. Half a minute; kept
# until this file changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=build/images/databases
packages=(
  postgresql-15 postgresql-client-15 redis-server redis-tools
  tzdata coreutils dash e2fsprogs # chroot --userspec, the shell of pg_ctl, mke2fs
  # what these are linked with
  libc6 libgcc-s1 libstdc++6 libcrypt1 libpq5 libicu72 libxml2 liblzma5 zlib1g liblz4-1 libzstd1 libssl3 libreadline8 libtinfo6
  libpam0g libaudit1 libcap-ng0 libsystemd0 libcap2 libgcrypt20 libgpg-error0 libselinux1 libpcre2-8-0 libacl1 libattr1 libgmp10
  libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 libldap-2.5-0 libsasl2-2
  libgnutls30 libnettle8 libhogweed6 libtasn1-6 libunistring2 libidn2-0 libp11-kit0 libffi8
  libjemalloc2 liblua5.1-0 lua-cjson lua-bitop liblzf1 libatomic1 libhiredis0.14 libext2fs2 libblkid1 libuuid1 libss2
)
key=$(sha256sum "${BASH_SOURCE[0]}" | cut -d ' ' -f 1)
[ "$(cat "$out/key" 2>/dev/null)" != "$key" ] || exit 0

rm -rf "$out"
mkdir -p "$out/debs" "$out/root"
download() { (cd "$out/debs" && apt-get -qq -o APT::Sandbox::User=root download "${packages[@]}"); }
download || { apt-get -qq update && download; } # lists that have grown old name versions that the mirror no longer has
for deb in "$out"/debs/*.deb; do dpkg-deb -x "$deb" "$out/root"; done
rm -rf "$out/debs"
cd "$out/root"
mkdir -p proc dev tmp data/shared data/block
chmod 1777 tmp
ln -sf dash bin/sh
printf '%s\n' root:x:0:0::/: postgres:x:115:120::/: redis:x:116:121::/: >etc/passwd
printf '%s\n' root:x:0: postgres:x:120: redis:x:121: >etc/group
cd - >/dev/null
echo "$key" >"$out/key"
