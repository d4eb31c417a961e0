package builtin

import (
	"fmt"
	"net"

	"github.com/containerd/errdefs"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// addLoopback sets lo up. It returns the previous result. If there is no previous result, it returns one that describes
// lo.
func (c *Call) addLoopback(conf *loopbackConfig) ([]byte, error) {
	result := &types100.Result{Interfaces: []*types100.Interface{{Name: "lo", Mac: "00:00:00:00:00:00", Sandbox: c.netns}}}
	err := inPod(c.netns, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := h.LinkSetUp(lo); err != nil {
			return fmt.Errorf("set lo up: %w", err)
		}
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			own, err := addresses(h, lo, family)
			if err != nil {
				return fmt.Errorf("addresses of lo: %w", err)
			}
			for i, a := range own {
				if !a.IP.IsLoopback() {
					return fmt.Errorf("lo has the address %s", a.IP)
				}
				if i == 0 {
					result.IPs = append(result.IPs, &types100.IPConfig{Interface: new(int), Address: *a.IPNet})
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if conf.PrevResult != nil {
		return printPrevious(conf.PrevResult, conf.CNIVersion)
	}
	return printResult(result, conf.CNIVersion)
}

// delLoopback sets lo down.
func (c *Call) delLoopback() error {
	if c.netns == "" {
		return nil
	}
	err := inPod(c.netns, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		return h.LinkSetDown(lo)
	})
	if errdefs.IsNotFound(err) { // the namespace is gone
		return nil
	}
	return err
}

// isV4 reports whether ip is an IPv4 address, in its 4-byte or 16-byte form.
func isV4(ip net.IP) bool { return ip.To4() != nil }
