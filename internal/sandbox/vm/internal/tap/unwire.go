package tap

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// Unwire undoes Wire. It removes the taps, even if a hypervisor has them open, and restores the addresses, because CNI
// plugins expect them in DEL. Unwire can be called in any state and more than once. Without a record, there is nothing
// to undo. If the namespace does not exist or is not the recorded one, for example after a reboot, Unwire only removes
// the record.
func Unwire(ctx context.Context, netns, path string) error {
	r, err := readRecord(path)
	switch {
	case errdefs.IsNotFound(err):
		return nil
	case errdefs.IsDataLoss(err):
		r = &record{} // the taps are found by their alias; the addresses are lost
	case err != nil:
		return err
	}
	err = inNetns(ctx, netns, func(h *netlink.Handle) error { return r.undo(ctx, h) })
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) { // both mean that there is no namespace
		return fmt.Errorf("unwire the network of %s from a guest: %w", netns, err)
	}
	return removeFile(path)
}

func (r *record) undo(ctx context.Context, h *netlink.Handle) error {
	links, err := netthread.Dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	for _, link := range links {
		if IsTap(link) {
			if err := h.LinkDel(link); err != nil && !isNotFound(err) {
				return fmt.Errorf("remove tap %s: %w", link.Attrs().Name, err)
			}
		}
	}
	if err := unwireRemoved.Hit(ctx); err != nil {
		return err
	}
	id, err := identify()
	if err != nil || r.Netns != id {
		return err
	}
	for _, w := range r.Links {
		i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == w.Link })
		if i < 0 || links[i].Attrs().HardwareAddr.String() != w.MAC {
			continue
		}
		if err := w.restore(h, links[i]); err != nil && !isNotFound(err) {
			return fmt.Errorf("restore %s: %w", w.Link, err)
		}
	}
	return unwireRestored.Hit(ctx)
}

// restore removes the link's filters and restores its addresses and routes.
func (w wiring) restore(h *netlink.Handle, link netlink.Link) error {
	// these two mean that there is no qdisc
	if err := h.QdiscDel(ingressQdisc(link)); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove its filters: %w", err)
	}
	if err := setDisableIPv6(w.Link, w.DisableIPv6); err != nil {
		return err
	}
	for _, addr := range w.LinkAddrs {
		a := &netlink.Addr{IPNet: netOf(addr)}
		if addr.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(link, a); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add address %s: %w", addr, err)
		}
	}
	for _, r := range w.Routes {
		route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: netOf(r.Dst), Priority: r.Metric}
		if r.GW.IsValid() {
			route.Gw, route.Flags = r.GW.AsSlice(), int(netlink.FLAG_ONLINK)
		} else if r.Dst.Addr().Is4() {
			route.Scope = netlink.SCOPE_LINK
		}
		if err := h.RouteReplace(route); err != nil {
			return fmt.Errorf("add the route to %s: %w", r.Dst, err)
		}
	}
	return nil
}
