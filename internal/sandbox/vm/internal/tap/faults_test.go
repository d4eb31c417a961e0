package tap_test

import (
	"context"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

// TestKilledAnywhere: a daemon that dies between two steps leaves what the next one finishes, or undoes.
func TestKilledAnywhere(t *testing.T) {
	failpoint.Needed(t)
	n := newNode(t, "")
	n.pod("neighbour")
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "network.tap.") {
			continue
		}
		t.Run(strings.TrimPrefix(point, "network.tap."), func(t *testing.T) {
			n := &node{Manager: n.Manager, t: t, dir: n.dir}
			id := strings.TrimPrefix(point, "network.tap.")
			r := n.pod(id)
			n.dieAt(id, point)
			if strings.HasPrefix(id, "unwire") { // what only Unwire may follow
				n.unwire(id)
			}
			interfaces := n.wire(id)
			if got := addrs(interfaces[0]); !reflect.DeepEqual(got, r.IPs) {
				t.Fatalf("wired %v, the pod has %v", got, r.IPs)
			}
			n.serve(id, interfaces)
			g := n.guest(id, interfaces)
			g.static(interfaces)
			n.listener(g.netns, "[::]:80", body(1))
			for _, ip := range r.IPs {
				if got := n.fetch("", netip.AddrPortFrom(ip, 80).String()); got != 1 {
					t.Errorf("%d bytes from %s", got, ip)
				}
			}
			n.unwire(id)
			if out := n.must(r.Netns, "ip", "addr", "show", "dev", "eth0"); !strings.Contains(out, r.IPs[0].String()) || !strings.Contains(out, r.IPs[1].String()) {
				t.Errorf("after Unwire:\n%s", out)
			}
		})
	}
}

// TestReboot: the namespace is gone, the record stays until Unwire; one of another namespace is forgotten.
func TestReboot(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	interfaces := n.wire("pod")
	if err := n.RemoveNetns(t.Context(), "pod"); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func() error{
		"Wire": func() error {
			_, err := tap.Wire(t.Context(), r.Netns, tap.Options{Record: n.record("pod")})
			return err
		},
		"Open":  func() error { _, err := tap.Open(t.Context(), r.Netns, "tap0"); return err },
		"Serve": func() error { _, err := tap.Serve(t.Context(), r.Netns, interfaces, tap.Config{}); return err },
	}
	for name, call := range calls {
		if err := call(); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if told, err := tap.Read(n.record("pod")); err != nil || !reflect.DeepEqual(told, interfaces) {
		t.Errorf("Read: %v, %v", told, err)
	}
	if _, err := n.NewNetns(t.Context(), "pod"); err != nil {
		t.Fatal(err)
	}
	if all := n.wire("pod"); len(all) != 0 {
		t.Errorf("in another namespace: %v", all)
	}
	if err := n.RemoveNetns(t.Context(), "pod"); err != nil {
		t.Fatal(err)
	}
	n.unwire("pod")
	if _, err := os.Stat(n.record("pod")); !os.IsNotExist(err) {
		t.Errorf("the record stays: %v", err)
	}
}

// TestTapGone: a tap that somebody removed is made again by the next Wire.
func TestTapGone(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	first := n.wire("pod")
	n.must(r.Netns, "ip", "link", "del", first[0].Tap)
	if _, err := tap.Serve(t.Context(), r.Netns, first, tap.Config{}); !errdefs.IsNotFound(err) {
		t.Errorf("Serve without its tap: %v", err)
	}
	interfaces := n.wire("pod")
	g := n.guest("pod", interfaces)
	g.static(interfaces)
	n.listener(g.netns, "[::]:80", body(1))
	for _, ip := range r.IPs {
		if got := n.fetch("", netip.AddrPortFrom(ip, 80).String()); got != 1 {
			t.Errorf("%d bytes from %s", got, ip)
		}
	}
}

// TestDamagedRecord: it is said, and Unwire gets rid of it and of the taps.
func TestDamagedRecord(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	n.wire("pod")
	if err := os.Truncate(n.record("pod"), 10); err != nil {
		t.Fatal(err)
	}
	if _, err := tap.Wire(t.Context(), r.Netns, tap.Options{Record: n.record("pod")}); !errdefs.IsDataLoss(err) {
		t.Errorf("Wire: %v", err)
	}
	n.unwire("pod")
	if out := n.must(r.Netns, "ip", "link"); strings.Contains(out, "tap0") {
		t.Errorf("left:\n%s", out)
	}
}

func TestErrors(t *testing.T) {
	n := newNode(t, "")
	n.pod("pod")
	if _, err := tap.Wire(t.Context(), n.Netns("pod"), tap.Options{Record: "relative"}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a relative record: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tap.Wire(ctx, n.Netns("pod"), tap.Options{Record: n.record("pod")}); err == nil {
		t.Error("Wire after the end of its context")
	}
	if err := tap.Unwire(t.Context(), n.Netns("nobody"), n.record("nobody")); err != nil {
		t.Errorf("Unwire of what never was: %v", err)
	}
	interfaces := n.wire("pod")
	n.must(n.Netns("pod"), "ip", "link", "del", "eth0")
	if _, err := tap.Wire(t.Context(), n.Netns("pod"), tap.Options{Record: n.record("pod")}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Wire without its interface: %v", err)
	}
	if err := n.Check(t.Context(), network.Attachment{ID: "pod"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Check without its interface: %v", err)
	}
	n.must(n.Netns("pod"), "ip", "link", "del", interfaces[0].Tap)
	if _, err := tap.Open(t.Context(), n.Netns("pod"), interfaces[0].Tap); !errdefs.IsNotFound(err) {
		t.Errorf("Open without its tap: %v", err)
	}
	n.unwire("pod")
}
