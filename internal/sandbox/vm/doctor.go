package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/network/tap"
)

// Finding is one thing that Doctor looked at.
type Finding struct {
	// Subject names it.
	Subject string
	// OK says that it is as it should be; Required, that machines cannot run when it is not.
	OK, Required bool
	// Detail tells what was found, Remedy what to do when it is not OK.
	Detail, Remedy string
}

// Doctor tries what machines need of this host's network, by doing it in a namespace that goes again. What they need of the
// hypervisor is its driver's to try.
func Doctor(ctx context.Context) []Finding {
	f := Finding{Subject: "vm network", Required: true, OK: true, Detail: "a tap is joined to a pod's link by tc u32 and mirred",
		Remedy: "run as root, with /dev/net/tun and the kernel modules tun, sch_ingress, cls_u32 and act_mirred"}
	if err := tryTap(ctx); err != nil {
		f.OK, f.Detail = false, err.Error()
	}
	return []Finding{f}
}

// tryTap joins a tap to a link.
func tryTap(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "tripod-check-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	netthread.Run(func() (restored bool) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("a network namespace: %w", err)
			return false // the thread ends, and the namespace with it
		}
		err = wireHere(ctx, fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), filepath.Join(dir, "taps.json"))
		return false
	})
	return err
}

// wireHere makes a link in the namespace of the calling thread, whose path is netns, and joins a tap to it.
func wireHere(ctx context.Context, netns, record string) error {
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"}
	if err := errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link)); err != nil {
		return fmt.Errorf("a link: %w", err)
	}
	const nobody = 65534
	wired, err := Taps{}.Wire(ctx, netns, tap.Options{Record: record, UID: nobody, GID: nobody})
	if err != nil {
		return err
	}
	if len(wired) != 1 {
		return fmt.Errorf("%d taps came of one link", len(wired))
	}
	opened, err := tap.Open(ctx, netns, wired[0].Tap)
	if err != nil {
		return err
	}
	opened.Close()
	return Taps{}.Unwire(ctx, netns, record)
}
