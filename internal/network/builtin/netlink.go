package builtin

import (
	"errors"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// inPod runs fn inside the network namespace at path, with a netlink handle of that namespace.
func inPod(path string, fn func(*netlink.Handle) error) error {
	netns, err := netthread.Open(path)
	if err != nil {
		return err
	}
	defer unix.Close(netns)
	return inNetns(netns, fn)
}

func inNetns(netns int, fn func(*netlink.Handle) error) error {
	return netthread.In(netns, func() error { return withHandle(fn) })
}

// withHandle runs fn with a new netlink handle. Handles are not shared, because a handle serialises its requests.
func withHandle(fn func(*netlink.Handle) error) error {
	handle, err := netthread.Handle()
	if err != nil {
		return err
	}
	defer handle.Close()
	return fn(handle)
}

func addresses(h *netlink.Handle, link netlink.Link, family int) ([]netlink.Addr, error) {
	return netthread.Dump(func() ([]netlink.Addr, error) { return h.AddrList(link, family) })
}

func notFound(err error) bool {
	_, missing := errors.AsType[netlink.LinkNotFoundError](err)
	return missing
}

// sysctl writes a file under /proc/sys/net of the thread's network namespace. Unlike sysctl names, the path elements
// can contain dots, as interface names do.
func sysctl(value string, name ...string) error {
	return os.WriteFile("/proc/sys/net/"+strings.Join(name, "/"), []byte(value), 0)
}

// ensureSysctl sets a sysctl unless it already has the wanted value.
func ensureSysctl(value string, name ...string) error {
	have, err := os.ReadFile("/proc/sys/net/" + strings.Join(name, "/"))
	if err == nil && strings.TrimSpace(string(have)) == value {
		return nil
	}
	return sysctl(value, name...)
}
