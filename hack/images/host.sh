#!/bin/bash
# host.sh: an ordinary Debian 12 as the host of a node, as the tests of test/host boot it, into build/images/host: vmlinuz,
# initrd.img and disk.qcow2 (one ext4, no partitions). It has systemd with cgroup v2 and AppArmor, sshd, what a node runs and
# what the tests call. Tripod is not in it: the tests install its package. Made of Debian's packages by mmdebstrap, as root,
# in two minutes; kept until this file changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=build/images/host
packages=linux-image-amd64,systemd-sysv,udev,dbus,libpam-systemd,openssh-server,apparmor,iproute2,kmod,procps,util-linux,ca-certificates
packages+=,crun,runc,conmon,catatonit,containernetworking-plugins,iptables,nftables,conntrack,criu # what a node runs
packages+=,qemu-system-x86,qemu-system-common,erofs-utils # machines, emulated by an emulated machine: they are few and small
packages+=,etcd-server,docker-registry,mosquitto,mosquitto-clients,skopeo,curl,jq,xz-utils,openssl,busybox,strace # what the tests call
key=$(sha256sum "${BASH_SOURCE[0]}" | cut -d ' ' -f 1)
[ "$(cat "$out/key" 2>/dev/null)" != "$key" ] || exit 0

work=$(mktemp -d "${TMPDIR:-/var/tmp}/tripod-host-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
rm -rf "$out"
mkdir -p "$out" "$work/files/etc/ssh/sshd_config.d" "$work/files/etc/systemd/network"

# The disk "payload" is made for each boot: programs, images, and the key that may log in.
cat >"$work/files/etc/fstab" <<'FSTAB'
LABEL=root    /        ext4 errors=remount-ro 0 1
LABEL=payload /payload ext4 defaults          0 0
FSTAB
echo node >"$work/files/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 node\n' >"$work/files/etc/hosts"
printf 'AuthorizedKeysFile /payload/authorized_keys\nStrictModes no\nMaxSessions 100\n' >"$work/files/etc/ssh/sshd_config.d/payload.conf"
# It matches pods' interfaces too, which the package's file for networkd must prevent. node0 is that of a test cluster.
printf '[Match]\nType=ether\nName=!node0\n[Network]\nDHCP=ipv4\n' >"$work/files/etc/systemd/network/uplink.network"
tar -C "$work/files" -cf "$work/files.tar" --owner=0 --group=0 .

mmdebstrap --quiet --mode=root --variant=apt --include="$packages" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --customize-hook="tar-in $work/files.tar /" \
  --customize-hook='mkdir "$1/payload" && rm -rf "$1"/var/cache/apt/*.bin && : >"$1/etc/machine-id"' \
  --customize-hook='chroot "$1" systemctl --quiet enable systemd-networkd.service && chroot "$1" systemctl --quiet disable etcd.service docker-registry.service mosquitto.service' \
  bookworm "$work/root" >"$out/log" 2>&1 || { tail -n 20 "$out/log" >&2; exit 1; }
mv "$work"/root/boot/vmlinuz-* "$out/vmlinuz"
mv "$work"/root/boot/initrd.img-* "$out/initrd.img"
mke2fs -q -t ext4 -L root -d "$work/root" "$work/disk.raw" 8G # holes cost nothing
qemu-img convert -c -o compression_type=zstd -O qcow2 "$work/disk.raw" "$out/disk.qcow2"
echo "$key" >"$out/key"
