package builtin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

var (
	delMarked   = failpoint.New("network.bridge.del.marked")
	delUnlinked = failpoint.New("network.bridge.del.unlinked")
)

// delBridge deletes the pod's interface and the masquerading rules for the pod's addresses. Then it frees the
// addresses. The host's end of the veth pair disappears with the pod's interface. The interface and the rules are
// deleted in parallel, because both deletions mostly wait for grace periods of the kernel.
func (c *Call) delBridge(ctx context.Context, conf *bridgeConfig) error {
	var addresses []net.IP
	var both guard.Group
	both.Go(c.delPair)
	both.Go(func() (err error) {
		// The leases know the addresses even if the namespace is gone.
		if addresses, err = c.leased(ctx); err != nil {
			return err
		}
		if err := conf.forget(addresses); err != nil || !conf.IPMasq {
			return err
		}
		// A rule that remained would apply to the next pod with the same address.
		return newMasquerade(conf.Name, c.container).remove(ctx, addresses)
	})
	if err := both.Wait(); err != nil {
		return err
	}
	if err := delUnlinked.Hit(ctx); err != nil {
		return err
	}
	return c.free(ctx, addresses)
}

// delPair deletes the pod's interface. A missing interface or namespace is not an error.
func (c *Call) delPair() error {
	if c.netns == "" {
		return nil
	}
	err := inPod(c.netns, func(h *netlink.Handle) error {
		link, err := h.LinkByName(c.ifName)
		if err == nil {
			err = h.LinkDel(link)
		}
		if err != nil && !notFound(err) {
			return fmt.Errorf("delete %s: %w", c.ifName, err)
		}
		return nil
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Interface is a pod's interface.
type Interface struct{ Netns, Name string }

// DeletePairs deletes the veth pairs of several pods before their DELs, which then find nothing to delete. The kernel
// deletes interfaces under a lock that all changes of interfaces share, and waits for a grace period meanwhile. If it
// deletes a group of interfaces at once, it waits only once.
//
// DeletePairs leaves to DEL what it cannot delete, and what is not a pair with one end on the host.
func DeletePairs(ctx context.Context, pods []Interface) error {
	return withHandle(func(host *netlink.Handle) error {
		// A number at random, because everything in the group is deleted, and because low numbers are used by administrators.
		group := rand.Uint32N(1<<30) + 1<<30
		var failures []error
		for _, pod := range pods {
			port, err := pod.port(host)
			if err == nil && port != nil {
				err = host.LinkSetGroup(port, int(group))
			}
			failures = append(failures, err)
		}
		if err := delMarked.Hit(ctx); err != nil {
			return err
		}
		return errors.Join(append(failures, deleteGroup(group))...)
	})
}

// port returns the host's end of the interface's veth pair, or nil if there is none.
func (i Interface) port(host *netlink.Handle) (netlink.Link, error) {
	var inside netlink.Link
	err := inPod(i.Netns, func(h *netlink.Handle) (err error) {
		inside, err = h.LinkByName(i.Name)
		return err
	})
	if notFound(err) || errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	port, err := host.LinkByIndex(inside.Attrs().ParentIndex)
	if notFound(err) {
		return nil, nil
	}
	if err != nil || !arePair(inside, port) {
		return nil, err
	}
	return port, nil
}

// arePair reports whether two interfaces in different namespaces refer to each other as the ends of a veth pair. An
// interface's index alone does not identify it, because each namespace counts for itself.
func arePair(a, b netlink.Link) bool {
	return a.Type() == "veth" && b.Type() == "veth" &&
		a.Attrs().ParentIndex == b.Attrs().Index && b.Attrs().ParentIndex == a.Attrs().Index
}

// deleteGroup deletes all interfaces of a group in the host's namespace.
func deleteGroup(group uint32) error {
	request := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	if _, err := request.Execute(unix.NETLINK_ROUTE, 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete the interfaces of group %d: %w", group, err)
	}
	return nil
}
