package tap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// flags of a tap: Ethernet frames, no packet information before them, but virtio's header, by which checksums and
// segmentation are left to who can do them best.
const flags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

const tunDevice = "/dev/net/tun"

// Open opens the tap of the namespace for a hypervisor: non-blocking, closed on exec, with virtio's header before each
// frame. One can have it open at a time.
//
// Errors: ErrNotFound when the namespace or the tap is gone, as after a reboot of the node; ErrFailedPrecondition when
// somebody has it open, or the node has no taps.
func Open(ctx context.Context, netns, tap string) (*os.File, error) {
	var file *os.File
	err := inside(ctx, netns, func(h *netlink.Handle) error {
		// TUNSETIFF would make one that is not there.
		if _, err := h.LinkByName(tap); err != nil {
			return linkError(tap, err)
		}
		fd, err := attach(tap)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), tap)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open tap %s of %s: %w", tap, netns, err)
	}
	return file, nil
}

// attach opens a tap of the calling thread's namespace, and makes it, not persistent, if it is not there.
func attach(name string) (fd int, err error) {
	fd, err = unix.Open(tunDevice, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s (is the kernel's module tun loaded?): %w: %w", tunDevice, err, errdefs.ErrFailedPrecondition)
	}
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	}
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("somebody has it open: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("TUNSETIFF: %w", err)
	}
	return fd, nil
}

// ensureTap finds the tap, or makes it, persistent and its owner's. A kill in the middle leaves none.
func ensureTap(h *netlink.Handle, w wiring, uid, gid int) (netlink.Link, error) {
	link, err := h.LinkByName(w.Tap)
	if isNotFound(err) {
		if err = makeTap(w.Tap, uid, gid); err == nil {
			link, err = h.LinkByName(w.Tap)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make tap %s: %w", w.Tap, err)
	}
	if _, ok := link.(*netlink.Tuntap); !ok {
		return nil, fmt.Errorf("make tap %s: it is there, but of type %s: %w", w.Tap, link.Type(), errdefs.ErrAlreadyExists)
	}
	if err := setDisableIPv6(w.Tap, "1"); err != nil { // the guest is to meet no neighbour there
		return nil, err
	}
	if !IsTap(link) {
		err = h.LinkSetAlias(link, alias+w.Link)
	}
	if err == nil && link.Attrs().MTU != w.MTU {
		err = h.LinkSetMTU(link, w.MTU)
	}
	if err == nil {
		err = h.LinkSetUp(link)
	}
	if err != nil {
		return nil, fmt.Errorf("set tap %s up, MTU %d: %w", w.Tap, w.MTU, err)
	}
	return link, nil
}

func makeTap(name string, uid, gid int) error {
	fd, err := attach(name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, set := range []struct {
		request uint
		value   int
	}{{unix.TUNSETOWNER, uid}, {unix.TUNSETGROUP, gid}, {unix.TUNSETPERSIST, 1}} {
		if err := unix.IoctlSetInt(fd, set.request, set.value); err != nil {
			return fmt.Errorf("ioctl %#x: %w", set.request, err)
		}
	}
	return nil
}

// inside runs fn on a thread that is in the network namespace, with a netlink handle of it. The namespace that is not
// there is ErrNotFound, a file in its place that is none ErrFailedPrecondition.
func inside(ctx context.Context, netns string, fn func(h *netlink.Handle) error) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	target, err := netthread.Open(netns)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	return netthread.In(target, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return fn(h)
	})
}

func isNotFound(err error) bool {
	_, missing := errors.AsType[netlink.LinkNotFoundError](err)
	return missing || errors.Is(err, unix.ENODEV)
}

func linkError(name string, err error) error {
	if isNotFound(err) {
		return fmt.Errorf("there is no interface %s in the namespace: %w", name, errdefs.ErrNotFound)
	}
	return fmt.Errorf("interface %s: %w", name, err)
}

// The sysctl by which an interface has no IPv6. On a node without IPv6 there is none, which reads as "".

func disableIPv6Path(link string) string {
	return filepath.Join("/proc/sys/net/ipv6/conf", link, "disable_ipv6")
}

func disableIPv6(link string) (string, error) {
	value, err := os.ReadFile(disableIPv6Path(link))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return strings.TrimSpace(string(value)), nil
}

func setDisableIPv6(link, value string) error {
	now, err := disableIPv6(link)
	if err != nil || now == "" || value == "" || now == value {
		return err
	}
	return os.WriteFile(disableIPv6Path(link), []byte(value), 0)
}
