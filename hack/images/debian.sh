#!/bin/bash
# debian.sh: a Debian 12 with systemd and a real cloud-init, as the tests of test/debian boot it, into build/images/debian:
# vmlinuz, initrd.img, disk.qcow2 (one ext4, no partitions) and cmdline. Made of Debian's packages by mmdebstrap, as root, in
# some three minutes; kept until this file changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=build/images/debian
packages=linux-image-amd64,cloud-init,e2fsprogs,systemd-sysv,udev,dbus,netplan.io,iproute2,systemd-resolved,openssh-server
key=$(sha256sum "${BASH_SOURCE[0]}" | cut -d ' ' -f 1)
[ "$(cat "$out/key" 2>/dev/null)" != "$key" ] || exit 0

work=$(mktemp -d "${TMPDIR:-/var/tmp}/tripod-debian-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
rm -rf "$out"
mkdir -p "$out"
mmdebstrap --quiet --mode=root --variant=apt --include="$packages" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --customize-hook='echo "/dev/disk/by-id/virtio-root / ext4 errors=remount-ro 0 1" >"$1/etc/fstab"' \
  --customize-hook='rm -rf "$1"/var/cache/apt/*.bin "$1"/etc/hostname "$1"/etc/ssh/ssh_host_* && : >"$1/etc/machine-id"' \
  bookworm "$work/root" >"$out/log" 2>&1 || { tail -n 20 "$out/log" >&2; exit 1; }
mv "$work"/root/boot/vmlinuz-* "$out/vmlinuz"
mv "$work"/root/boot/initrd.img-* "$out/initrd.img"
# Twice what is in it, so that there is room; holes cost nothing.
mke2fs -q -t ext4 -L root -d "$work/root" "$work/disk.raw" "$(($(du -sm "$work/root" | cut -f 1) * 2))M"
qemu-img convert -c -o compression_type=zstd -O qcow2 "$work/disk.raw" "$out/disk.qcow2"
# The check of the timer takes a busy host for broken hardware.
echo 'root=/dev/disk/by-id/virtio-root rw console=ttyS0 no_timer_check' >"$out/cmdline"
echo "$key" >"$out/key"
