package guestnode

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/identity"
)

const (
	// deviceTime bounds the wait for the devices that the pod needs, and devicePoll is the pause between two looks at them.
	deviceTime = 20 * time.Second
	devicePoll = 2 * time.Millisecond
)

// mountScratch mounts the scratch disk.
func mountScratch() error {
	if err := os.MkdirAll(scratch, 0o755); err != nil {
		return err
	}
	if mounted(scratch) {
		return nil
	}
	device, err := guestinit.FindDisk(guestapi.ScratchSerial)
	if err != nil {
		return err
	}
	if err := unix.Mount(device, scratch, "ext4", unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		return fmt.Errorf("mount the scratch disk: %w", err)
	}
	return nil
}

// trim tells the disk of a file system which blocks are unused. It leaves out pieces that the disk's image cannot give back.
func trim(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	piece := struct{ start, length, least uint64 }{0, math.MaxUint64, 64 << 10} // struct fstrim_range; a cluster of qcow2
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fitrim, uintptr(unsafe.Pointer(&piece))); errno != 0 {
		return os.NewSyscallError("FITRIM", errno)
	}
	return nil
}

// fitrim is FITRIM in linux/fs.h.
const fitrim = 0xc0185879

// mounted reports whether the directory is a mount point.
func mounted(dir string) bool {
	var st, parent unix.Stat_t
	return unix.Lstat(dir, &st) == nil && unix.Lstat(filepath.Dir(dir), &parent) == nil && st.Dev != parent.Dev
}

// stepAbove is the difference above which a clock is set at once while containers run. Below, it becomes a little faster or
// slower for some time, and never goes back.
const stepAbove = 500 * time.Millisecond

// adjustClock is identity.SetClock for a guest with running containers.
func adjustClock(behind time.Duration) error {
	if behind.Abs() > stepAbove {
		return identity.SetClock(behind)
	}
	_, err := unix.Adjtimex(&unix.Timex{Modes: unix.ADJ_OFFSET_SINGLESHOT, Offset: behind.Microseconds()})
	return os.NewSyscallError("adjtimex", err)
}

// configure gives the guest its network and the pod's volumes. It can be repeated.
func configure(ctx context.Context, s guestapi.Setup) error {
	ctx, cancel := context.WithTimeout(ctx, deviceTime)
	defer cancel()
	if !mounted(guestapi.Shared) {
		err := await(ctx, func() error { return unix.Mount(guestapi.ShareTag, guestapi.Shared, "virtiofs", unix.MS_NODEV, "") })
		if err != nil {
			return fmt.Errorf("mount the pod's volumes: %w", err)
		}
	}
	if err := pinNetns(); err != nil {
		return fmt.Errorf("pin the network namespace: %w", err)
	}
	for _, i := range s.Interfaces {
		if err := configureInterface(ctx, i); err != nil {
			return fmt.Errorf("interface %s: %w", i.Name, err)
		}
	}
	return nil
}

// await repeats a call until it succeeds. The devices of a machine that has just continued from a template appear only now.
func await(ctx context.Context, call func() error) error {
	tick := time.NewTicker(devicePoll)
	defer tick.Stop()
	for {
		err := call()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}

// putOnline waits until the guest has so many CPUs, and puts them online.
func putOnline(ctx context.Context, cpus int) error {
	ctx, cancel := context.WithTimeout(ctx, deviceTime)
	defer cancel()
	for i := range cpus {
		dir := fmt.Sprintf("/sys/devices/system/cpu/cpu%d", i)
		err := await(ctx, func() error {
			_, err := os.Stat(dir)
			return err
		})
		if err != nil {
			return fmt.Errorf("wait for CPU %d of %d: %w", i+1, cpus, err)
		}
		online := filepath.Join(dir, "online") // which the first one does not have
		if state, err := os.ReadFile(online); err != nil || strings.TrimSpace(string(state)) == "1" {
			continue
		}
		if err := os.WriteFile(online, []byte("1"), 0); err != nil {
			return err
		}
	}
	return nil
}

// freeze writes what is not on the scratch disk yet, and frees memory that a copy of the guest does not need. The kernel's
// caches stay: they hold the programs that each copy runs.
func freeze() {
	unix.Sync()
	debug.FreeOSMemory()
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
func configureInterface(ctx context.Context, i guestapi.Interface) error {
	var link netlink.Link
	err := await(ctx, func() (err error) {
		link, err = linkOf(i.MAC)
		return err
	})
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

// loadTables loads the modules of iptables for a container that may use it, unless they are loaded. The kernel loads all others
// when they are needed, but expects these from the program iptables (xtables-legacy), which is in a container without them.
func loadTables(s *runtimeapi.LinuxContainerSecurityContext) {
	mayUse := s.GetPrivileged() || slices.ContainsFunc(s.GetCapabilities().GetAddCapabilities(), func(name string) bool {
		name = strings.TrimPrefix(strings.ToUpper(name), "CAP_")
		return name == "NET_ADMIN" || name == "ALL"
	})
	if !mayUse {
		return
	}
	for _, name := range []string{"ip_tables", "ip6_tables"} {
		_ = guestinit.LoadModule(name) // without it, iptables reports what is missing
	}
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
