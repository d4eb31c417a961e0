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

// flags make a tap carry Ethernet frames without packet information. A virtio header precedes each frame and allows
// checksum and segmentation offloading.
const flags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

const tunDevice = "/dev/net/tun"

// Open opens a tap in the given namespace for a hypervisor. The file is non-blocking and close-on-exec, and a virtio
// header precedes each frame. Only one process can have the tap open.
//
// Open returns ErrNotFound if the namespace or the tap does not exist, for example after a reboot, and
// ErrFailedPrecondition if the tap is already open or the kernel has no taps.
func Open(ctx context.Context, netns, tap string) (*os.File, error) {
	var file *os.File
	err := inNetns(ctx, netns, func(h *netlink.Handle) error {
		// Check that the tap exists, because TUNSETIFF would create a missing one.
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

// attach opens a tap in the calling thread's namespace. If the tap does not exist, attach creates one, which is not
// persistent.
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
		err = fmt.Errorf("another process has it open: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("TUNSETIFF: %w", err)
	}
	return fd, nil
}

// ensureTap configures the tap. If the tap does not exist, ensureTap first makes one that is persistent and owned by
// the given user. If the daemon is killed meanwhile, no tap without an owner remains, because a tap becomes persistent
// only after it has its owner.
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
		return nil, fmt.Errorf("make tap %s: an interface of type %s has this name: %w", w.Tap, link.Type(), errdefs.ErrAlreadyExists)
	}
	if err := setDisableIPv6(w.Tap, "1"); err != nil { // the namespace must not be a neighbour of the guest
		return nil, err
	}
	if !IsTap(link) {
		err = h.LinkSetAlias(link, aliasPrefix+w.Link)
	}
	if err == nil && link.Attrs().MTU != w.MTU {
		err = h.LinkSetMTU(link, w.MTU)
	}
	if err == nil {
		err = h.LinkSetUp(link)
	}
	if err != nil {
		return nil, fmt.Errorf("bring up tap %s with MTU %d: %w", w.Tap, w.MTU, err)
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

// inNetns runs fn on a thread in the network namespace and gives fn a netlink handle for that namespace. It returns
// ErrNotFound if the namespace does not exist, and ErrFailedPrecondition if the path is a file but not a namespace.
func inNetns(ctx context.Context, netns string, fn func(h *netlink.Handle) error) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	target, err := netthread.Open(netns)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	return netthread.In(target, func() error {
		h, err := netthread.Handle()
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
		return fmt.Errorf("the namespace has no interface %s: %w", name, errdefs.ErrNotFound)
	}
	return fmt.Errorf("interface %s: %w", name, err)
}

func disableIPv6Path(link string) string {
	return filepath.Join("/proc/sys/net/ipv6/conf", link, "disable_ipv6")
}

// disableIPv6 reads the link's sysctl disable_ipv6. It returns "" on a node without IPv6.
func disableIPv6(link string) (string, error) {
	value, err := os.ReadFile(disableIPv6Path(link))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return strings.TrimSpace(string(value)), nil
}

// setDisableIPv6 sets the link's sysctl disable_ipv6. It does nothing if the sysctl does not exist or the given value
// is empty.
func setDisableIPv6(link, value string) error {
	now, err := disableIPv6(link)
	if err != nil || now == "" || value == "" || now == value {
		return err
	}
	return os.WriteFile(disableIPv6Path(link), []byte(value), 0)
}
