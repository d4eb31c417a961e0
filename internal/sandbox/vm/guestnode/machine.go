package guestnode

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// maxSkew is how far the guest's clock may be from the node's before it is set. The machine's own clock has whole seconds.
const maxSkew = 5 * time.Millisecond

// mountScratch mounts the scratch disk.
func mountScratch() error {
	if err := os.MkdirAll(scratch, 0o755); err != nil {
		return err
	}
	if mounted(scratch) {
		return nil
	}
	device, err := findScratch()
	if err != nil {
		return err
	}
	if err := unix.Mount(device, scratch, "ext4", unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		return fmt.Errorf("mount the scratch disk: %w", err)
	}
	return nil
}

// findScratch returns the path of the scratch disk.
func findScratch() (string, error) {
	files, _ := filepath.Glob("/sys/block/*/serial")
	for _, file := range files {
		serial, err := os.ReadFile(file)
		if err == nil && strings.TrimSpace(string(serial)) == guestapi.ScratchSerial {
			return "/dev/" + filepath.Base(filepath.Dir(file)), nil
		}
	}
	return "", fmt.Errorf("the machine has no disk with the serial number %s", guestapi.ScratchSerial)
}

// mounted reports whether the directory is a mount point.
func mounted(dir string) bool {
	var st, parent unix.Stat_t
	return unix.Lstat(dir, &st) == nil && unix.Lstat(filepath.Dir(dir), &parent) == nil && st.Dev != parent.Dev
}

// configure gives the guest its clock, its network and the pod's volumes. It can be repeated.
func configure(s guestapi.Setup) error {
	if skew := time.Since(s.Now); skew.Abs() > maxSkew {
		now := unix.NsecToTimeval(s.Now.UnixNano())
		if err := unix.Settimeofday(&now); err != nil {
			return os.NewSyscallError("settimeofday", err)
		}
	}
	if !mounted(guestapi.Shared) {
		if err := unix.Mount(guestapi.ShareTag, guestapi.Shared, "virtiofs", unix.MS_NODEV, ""); err != nil {
			return fmt.Errorf("mount the pod's volumes: %w", err)
		}
	}
	if err := pinNetns(); err != nil {
		return fmt.Errorf("pin the network namespace: %w", err)
	}
	for _, i := range s.Interfaces {
		if err := configureInterface(i); err != nil {
			return fmt.Errorf("interface %s: %w", i.Name, err)
		}
	}
	return nil
}

// pinNetns pins the guest's network namespace on the file that containers join.
func pinNetns() error {
	f, err := os.OpenFile(netns, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	var st unix.Statfs_t
	if err := unix.Statfs(netns, &st); err != nil || st.Type == unix.NSFS_MAGIC {
		return err
	}
	return unix.Mount("/proc/self/ns/net", netns, "", unix.MS_BIND, "")
}

// configureInterface gives the interface with the MAC address its name, its addresses and its routes.
func configureInterface(i guestapi.Interface) error {
	link, err := linkOf(i.MAC)
	if err != nil {
		return err
	}
	if link.Attrs().Name != i.Name {
		if err := errors.Join(netlink.LinkSetDown(link), netlink.LinkSetName(link, i.Name)); err != nil {
			return err
		}
	}
	if i.MTU > 0 {
		if err := netlink.LinkSetMTU(link, i.MTU); err != nil {
			return err
		}
	}
	for _, prefix := range i.Addrs {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}}
		if prefix.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // the node has made sure that the address is unique
		}
		if err := netlink.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("address %s: %w", prefix, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	for _, r := range i.Routes {
		route := &netlink.Route{
			LinkIndex: link.Attrs().Index, Priority: r.Metric,
			Dst: &net.IPNet{IP: r.Dst.Addr().AsSlice(), Mask: net.CIDRMask(r.Dst.Bits(), r.Dst.Addr().BitLen())},
		}
		if r.Via.IsValid() {
			route.Gw = r.Via.AsSlice()
		} else {
			route.Scope = netlink.SCOPE_LINK
		}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("route to %s: %w", r.Dst, err)
		}
	}
	return nil
}

// linkOf returns the interface with a MAC address.
func linkOf(mac string) (netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		if strings.EqualFold(link.Attrs().HardwareAddr.String(), mac) {
			return link, nil
		}
	}
	return nil, fmt.Errorf("the machine has no interface with the address %s", mac)
}
