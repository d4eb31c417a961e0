package tap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// Check tests, in a temporary network namespace, whether a tap can be connected to a link.
func Check(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "tripod-check-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	netthread.Run(func() (restored bool) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("make a network namespace: %w", err)
			return false // the thread ends, and its namespace with it
		}
		err = wireLink(ctx, fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), filepath.Join(dir, "taps.json"))
		return false
	})
	return err
}

// wireLink makes a link in the calling thread's network namespace, whose path is netns, and connects a tap to the link.
func wireLink(ctx context.Context, netns, record string) error {
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"}
	if err := errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link)); err != nil {
		return fmt.Errorf("make a link: %w", err)
	}
	const nobody = 65534
	wired, err := Wire(ctx, netns, Options{Record: record, UID: nobody, GID: nobody})
	if err != nil {
		return err
	}
	if len(wired) != 1 {
		return fmt.Errorf("one link got %d taps", len(wired))
	}
	opened, err := Open(ctx, netns, wired[0].Tap)
	if err != nil {
		return err
	}
	opened.Close()
	return Unwire(ctx, netns, record)
}
