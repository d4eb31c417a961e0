package cloudinit

import (
	"fmt"
	"path"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// linkFunction makes $2 a link to the disk with the serial number $1, unless $2 exists and is not a link. It does not
// need udev. It searches two kinds of files, because virtio-blk and SCSI have different files for the serial number.
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

// linkScript returns the script that makes the guest's links to block devices, or "" if there are no devices.
func (b *builder) linkScript() string {
	if len(b.in.Devices) == 0 {
		return ""
	}
	return "#!/bin/sh\n" + b.linkCommands()
}

func (b *builder) linkCommands() string {
	var s strings.Builder
	s.WriteString(linkFunction)
	for _, d := range b.in.Devices {
		fmt.Fprintf(&s, "link_device %s %s\n", quoteShell(d.Serial), quoteShell(path.Clean(d.Path)))
	}
	return s.String()
}

// udevPath returns udev's link to a device.
func (b *builder) udevPath(d Device) string {
	if b.in.Options.DiskBus == machine.BusSCSI {
		return "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_" + d.Serial
	}
	return "/dev/disk/by-id/virtio-" + d.Serial
}

// mountScript returns the script that mounts the shares in guests whose cloud-init does not mount them. It returns ""
// if there are no shares.
func (b *builder) mountScript(shares []Mount) string {
	if len(shares) == 0 {
		return ""
	}
	return "#!/bin/sh\n" + b.mountCommands(shares)
}

// mountFunction mounts the share with the tag $1 at $2, with the options $3, unless $2 is already a mount point. It
// writes failures to the console.
const mountFunction = `mount_share() {
	mkdir -p "$2" && at=$(cd "$2" && pwd -P) || return
	grep -qF " $at " /proc/mounts && return
	mount -t %s -o "$3" "$1" "$2" && return
	echo "Tripod: cannot mount %s at $2: the guest's kernel may not support it; choose another driver with the annotation tripod.dev/vm.share-driver" >/dev/console
}
`

func (b *builder) mountCommands(shares []Mount) string {
	if len(shares) == 0 {
		return ""
	}
	var s strings.Builder
	fmt.Fprintf(&s, mountFunction, b.shareType(), b.shareType())
	for _, m := range shares {
		fmt.Fprintf(&s, "mount_share %s %s %s\n", m.Tag, quoteShell(m.ContainerPath), b.mountOptions(m))
	}
	return s.String()
}

// startAgent runs the agent from the disk labelled TRIPODAGENT, and restarts it whenever it ends. Without udev, it
// finds the disk by the label at byte 40 of sector 16.
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

// vendorData returns a boothook, which runs early in every boot, with any init system and any user-data. A runcmd would
// not always run, because cloud-init merges vendor-data and user-data, and a runcmd in the user-data would replace
// ours.
func (b *builder) vendorData(shares []Mount) string {
	var s strings.Builder
	s.WriteString("#cloud-boothook\n#!/bin/sh\n# Made by Tripod.\n")
	if len(b.in.Devices) > 0 {
		s.WriteString(b.linkCommands())
	}
	s.WriteString(b.mountCommands(shares))
	if b.in.Agent {
		s.WriteString(startAgent)
	}
	s.WriteString("exit 0\n")
	return s.String()
}
