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
)

// Between the steps of Wire and Unwire.
var (
	wireRecorded   = failpoint.New("network.tap.wire.recorded")
	wireTapped     = failpoint.New("network.tap.wire.tapped")
	wireMoved      = failpoint.New("network.tap.wire.moved")
	wireJoined     = failpoint.New("network.tap.wire.joined")
	unwireParted   = failpoint.New("network.tap.unwire.parted")
	unwireRestored = failpoint.New("network.tap.unwire.restored")
)

// Options of Wire.
type Options struct {
	// Record is the path of the file that Wire keeps until Unwire; its directory is there.
	Record string
	// UID and GID own the taps: a process of theirs may open them without further rights.
	UID, GID int
}

// Wire joins each interface of the namespace to a tap and takes its addresses away, for the guest to have them. It
// returns the guest's interfaces, eth0 first; an empty list when there are none. A repeat returns the same and finishes
// what was cut off, be it while a guest runs. What a record of another namespace says is forgotten.
//
// Errors: ErrNotFound when the namespace is gone, ErrFailedPrecondition when an interface of the record is, or the
// kernel lacks something; ErrDataLoss for a damaged record, which Unwire removes.
func Wire(ctx context.Context, netns string, o Options) ([]Interface, error) {
	var r *record
	err := inside(ctx, netns, func(h *netlink.Handle) (err error) {
		if r, err = begin(h, o.Record); err != nil {
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
		return nil, fmt.Errorf("give the network of %s to a guest: %w", netns, err)
	}
	return r.interfaces(), nil
}

// begin reads the record of an earlier Wire, or writes that of this one.
func begin(h *netlink.Handle, path string) (*record, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("the record's path %q is not absolute: %w", path, errdefs.ErrInvalidArgument)
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
	if r.Links, err = look(h); err != nil {
		return nil, err
	}
	return r, r.write(path)
}

func wireOne(ctx context.Context, h *netlink.Handle, w wiring, o Options) error {
	link, err := h.LinkByName(w.Link)
	if err == nil && link.Attrs().HardwareAddr.String() != w.MAC {
		err = fmt.Errorf("its MAC was %s and is %s: %w", w.MAC, link.Attrs().HardwareAddr, errdefs.ErrFailedPrecondition)
	} else if isNotFound(err) {
		err = fmt.Errorf("the interface is gone: %w", errdefs.ErrFailedPrecondition)
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
	if err := takeAddresses(h, link); err != nil {
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

// takeAddresses takes every address off the link; the kernel takes the routes with them.
func takeAddresses(h *netlink.Handle, link netlink.Link) error {
	name := link.Attrs().Name
	if err := setDisableIPv6(name, "1"); err != nil {
		return fmt.Errorf("take the IPv6 addresses off: %w", err)
	}
	have, err := list(func() ([]netlink.Addr, error) { return h.AddrList(link, unix.AF_INET) })
	if err != nil {
		return fmt.Errorf("list its addresses: %w", err)
	}
	for i := range have {
		if err := h.AddrDel(link, &have[i]); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) { // gone with its primary one
			return fmt.Errorf("take address %s off: %w", have[i].IPNet, err)
		}
	}
	return nil
}
