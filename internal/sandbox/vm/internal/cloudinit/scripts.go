package cloudinit

import (
	"fmt"
	"path"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// linkFunction finds the disk with the serial $1 without udev (virtio-blk and SCSI show it differently) and links $2 to it,
// if there is nothing but such a link yet.
const linkFunction = `link_device() {
	for f in /sys/block/*/serial /sys/block/*/device/vpd_pg80; do
		[ -r "$f" ] || continue
		case $f in
		*/serial) serial=$(cat "$f") ;;
		*) serial=$(tail -c +5 "$f" | tr -d '\000 ') ;;
		esac
		[ "$serial" = "$1" ] || continue
		device=${f#/sys/block/}
		if [ -L "$2" ] || [ ! -e "$2" ]; then
			mkdir -p "${2%/*}/" && ln -sfn "/dev/${device%%/*}" "$2"
		fi
		return
	done
}
`

// linkScript gives block devices their names in the guest; empty without any.
func (b *builder) linkScript() string {
	if len(b.in.Devices) == 0 {
		return ""
	}
	return "#!/bin/sh\n" + b.links()
}

func (b *builder) links() string {
	var s strings.Builder
	s.WriteString(linkFunction)
	for _, d := range b.in.Devices {
		fmt.Fprintf(&s, "link_device %s %s\n", quoteShell(d.Serial), quoteShell(path.Clean(d.Path)))
	}
	return s.String()
}

// byID is the name that udev gives a device.
func (b *builder) byID(d Device) string {
	if b.in.Options.DiskBus == machine.BusSCSI {
		return "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_" + d.Serial
	}
	return "/dev/disk/by-id/virtio-" + d.Serial
}

// mountScript mounts what is not mounted yet, for guests whose cloud-init knows no mounts; empty without shares.
func (b *builder) mountScript(shares []Mount) string {
	if len(shares) == 0 {
		return ""
	}
	return "#!/bin/sh\n" + b.mountCommands(shares)
}

// mountFunction mounts the share with the tag $1 at $2, with the options $3, unless something is mounted there. What is in
// the way is said on the console.
const mountFunction = `mount_share() {
	mkdir -p "$2" && at=$(cd "$2" && pwd -P) || return
	grep -qF " $at " /proc/mounts && return
	mount -t %s -o "$3" "$1" "$2" && return
	echo "Tripod: %s is not mounted at $2: the kernel of this guest may lack it; annotation tripod.dev/vm.share-driver names another way" >/dev/console
}
`

func (b *builder) mountCommands(shares []Mount) string {
	if len(shares) == 0 {
		return ""
	}
	var s strings.Builder
	fmt.Fprintf(&s, mountFunction, b.shareType(), b.shareType())
	for _, m := range shares {
		fmt.Fprintf(&s, "mount_share %s %s %s\n", m.Tag, quoteShell(m.ContainerPath), b.options(m))
	}
	return s.String()
}

// startAgent runs the agent from the disk labelled TRIPODAGENT, which is found without udev, too: a volume's label is at
// byte 40 of sector 16. It is started again whenever it ends.
const startAgent = `dir=/run/tripod-agent
disk=/dev/disk/by-label/TRIPODAGENT
if [ ! -b "$disk" ]; then
	for d in /sys/block/*; do
		disk=/dev/${d##*/}
		[ "$(dd if="$disk" bs=1 skip=32808 count=11 2>/dev/null | tr -d '\000')" = TRIPODAGENT ] && break
		disk=
	done
fi
if [ -n "$disk" ] && ! grep -q " $dir " /proc/mounts; then
	mkdir -p "$dir"
	if mount -t iso9660 -o ro "$disk" "$dir"; then
		if [ -d /run/systemd/system ] && command -v systemd-run >/dev/null; then
			systemd-run --no-block --unit=tripod-agent -p Restart=always -p RestartSec=1 "$dir/tripod-agent"
		else
			(while :; do "$dir/tripod-agent"; sleep 1; done) </dev/null >/dev/null 2>&1 &
		fi
	fi
fi
`

// vendorData is run early in every boot, by any init system, whatever the user data says: vendor and user data are merged
// by cloud-init, and a runcmd of the one replaces that of the other.
func (b *builder) vendorData(shares []Mount) string {
	var s strings.Builder
	s.WriteString("#cloud-boothook\n#!/bin/sh\n# Made by Tripod.\n")
	if len(b.in.Devices) > 0 {
		s.WriteString(b.links())
	}
	s.WriteString(b.mountCommands(shares))
	if b.in.Agent {
		s.WriteString(startAgent)
	}
	s.WriteString("exit 0\n")
	return s.String()
}
