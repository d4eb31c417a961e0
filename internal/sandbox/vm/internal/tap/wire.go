package tap

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/network/netthread"
)

// Fail points between the steps of Wire and Unwire.
var (
	wireRecorded   = failpoint.New("network.tap.wire.recorded")
	wireTapped     = failpoint.New("network.tap.wire.tapped")
	wireMoved      = failpoint.New("network.tap.wire.moved")
	wireJoined     = failpoint.New("network.tap.wire.joined")
	unwireRemoved  = failpoint.New("network.tap.unwire.parted")
	unwireRestored = failpoint.New("network.tap.unwire.restored")
)

// Options configures Wire.
type Options struct {
	// Record is the absolute path of the record, which exists from Wire to Unwire. Its directory must exist.
	Record string
	// UID and GID own the taps. A process of this user can open them without privileges.
	UID, GID int
}

// Wire connects each interface of the namespace to a tap and removes the interface's addresses, which become the
// guest's. It returns the guest's interfaces, eth0 first; the list can be empty. A repeated call returns the same list
// and completes an interrupted Wire, even while a guest runs. A record of another namespace is replaced.
//
// Wire returns ErrNotFound if the namespace does not exist, ErrFailedPrecondition if an interface of the record is
// missing or the kernel lacks a feature, and ErrDataLoss if the record is damaged. Unwire removes a damaged record.
func Wire(ctx context.Context, netns string, o Options) ([]Interface, error) {
	var r *record
	err := inNetns(ctx, netns, func(h *netlink.Handle) (err error) {
		if r, err = loadOrCreateRecord(h, o.Record); err != nil {
			return err
		}
		if err := wireRecorded.Hit(ctx); err != nil {
			return err
		}
		for _, w := range r.Links {
			if err := wireOne(ctx, h, w, o); err != nil {
				return fmt.Errorf("%s: %w", w.Link, err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("wire the network of %s to a guest: %w", netns, err)
	}
	return r.interfaces(), nil
}

// loadOrCreateRecord returns the record of an earlier Wire in this namespace, or writes a new record.
func loadOrCreateRecord(h *netlink.Handle, path string) (*record, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("record path %q is not absolute: %w", path, errdefs.ErrInvalidArgument)
	}
	id, err := identify()
	if err != nil {
		return nil, err
	}
	r, err := readRecord(path)
	if err == nil && r.Netns == id {
		return r, nil
	}
	if err != nil && !errdefs.IsNotFound(err) {
		return nil, err
	}
	r = &record{Version: recordVersion, Netns: id}
	if r.Links, err = readNetwork(h); err != nil {
		return nil, err
	}
	return r, r.write(path)
}

func wireOne(ctx context.Context, h *netlink.Handle, w wiring, o Options) error {
	link, err := h.LinkByName(w.Link)
	if err == nil && link.Attrs().HardwareAddr.String() != w.MAC {
		err = fmt.Errorf("its MAC changed from %s to %s: %w", w.MAC, link.Attrs().HardwareAddr, errdefs.ErrFailedPrecondition)
	} else if isNotFound(err) {
		err = fmt.Errorf("the interface no longer exists: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	tap, err := ensureTap(h, w, o.UID, o.GID)
	if err != nil {
		return err
	}
	if err := wireTapped.Hit(ctx); err != nil {
		return err
	}
	if err := removeAddresses(h, link); err != nil {
		return err
	}
	if err := wireMoved.Hit(ctx); err != nil {
		return err
	}
	fromWire, fromGuest := filters(w.Interface)
	if err := ensureFilters(h, link, tap, fromWire); err != nil {
		return err
	}
	if err := ensureFilters(h, tap, link, fromGuest); err != nil {
		return err
	}
	_ = announce(w.Interface, link.Attrs().Index)
	return wireJoined.Hit(ctx)
}

// removeAddresses removes every address from the link. The kernel then removes the routes too.
func removeAddresses(h *netlink.Handle, link netlink.Link) error {
	name := link.Attrs().Name
	if err := setDisableIPv6(name, "1"); err != nil {
		return fmt.Errorf("remove its IPv6 addresses: %w", err)
	}
	have, err := netthread.Dump(func() ([]netlink.Addr, error) { return h.AddrList(link, unix.AF_INET) })
	if err != nil {
		return fmt.Errorf("list its addresses: %w", err)
	}
	for i := range have {
		// the kernel has removed it, together with its primary address
		if err := h.AddrDel(link, &have[i]); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("remove address %s: %w", have[i].IPNet, err)
		}
	}
	return nil
}
