package tap

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Unwire undoes Wire: the taps go, with them what a hypervisor has open of them, and the addresses return to the pod's
// interfaces, where plugins look for them in DEL. It may be called in any state and repeated; without a record, or in a
// namespace that is another one or gone, as after a reboot, there is nothing to undo but the record.
func Unwire(ctx context.Context, netns, path string) error {
	r, err := readRecord(path)
	switch {
	case errdefs.IsNotFound(err):
		return nil
	case errdefs.IsDataLoss(err):
		r = &record{} // the taps are known by their mark; the addresses are lost
	case err != nil:
		return err
	}
	err = inside(ctx, netns, func(h *netlink.Handle) error { return r.undo(ctx, h) })
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) { // no namespace
		return fmt.Errorf("take the network of %s back from a guest: %w", netns, err)
	}
	return removeFile(path)
}

func (r *record) undo(ctx context.Context, h *netlink.Handle) error {
	links, err := list(h.LinkList)
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
	if err := unwireParted.Hit(ctx); err != nil {
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
			return fmt.Errorf("give %s back what it had: %w", w.Link, err)
		}
	}
	return unwireRestored.Hit(ctx)
}

// restore brings the link back to what it was.
func (w wiring) restore(h *netlink.Handle, link netlink.Link) error {
	if err := h.QdiscDel(ingress(link)); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // none
		return fmt.Errorf("its filters: %w", err)
	}
	if err := setDisableIPv6(w.Link, w.DisableIPv6); err != nil {
		return err
	}
	for _, addr := range w.Had {
		a := &netlink.Addr{IPNet: netOf(addr)}
		if addr.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(link, a); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("address %s: %w", addr, err)
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
			return fmt.Errorf("route to %s: %w", r.Dst, err)
		}
	}
	return nil
}
