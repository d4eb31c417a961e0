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

// TestKilledAnywhere: after a kill between any two steps, the next daemon can complete or undo the wiring.
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
			if strings.HasPrefix(id, "unwire") { // only Unwire can follow
				n.unwire(id)
			}
			interfaces := n.wire(id)
			if got := addrs(interfaces[0]); !reflect.DeepEqual(got, r.IPs) {
				t.Fatalf("addresses of the guest = %v, want the pod's %v", got, r.IPs)
			}
			n.serve(id, interfaces)
			g := n.guest(id, interfaces)
			g.static(interfaces)
			n.listener(g.netns, "[::]:80", body(1))
			for _, ip := range r.IPs {
				if got := n.fetch("", netip.AddrPortFrom(ip, 80).String()); got != 1 {
					t.Errorf("got %d bytes from %s, want 1", got, ip)
				}
			}
			n.unwire(id)
			if out := n.must(r.Netns, "ip", "addr", "show", "dev", "eth0"); !strings.Contains(out, r.IPs[0].String()) ||
				!strings.Contains(out, r.IPs[1].String()) {
				t.Errorf("eth0 lacks an address of the pod after Unwire:\n%s", out)
			}
		})
	}
}

// TestReboot: without the namespace, the record stays until Unwire. Wire in another namespace replaces it.
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
			t.Errorf("%s without the namespace: got error %v, want ErrNotFound", name, err)
		}
	}
	if got, err := tap.Read(n.record("pod")); err != nil || !reflect.DeepEqual(got, interfaces) {
		t.Errorf("Read = %v, %v; want %v", got, err, interfaces)
	}
	if _, err := n.NewNetns(t.Context(), "pod"); err != nil {
		t.Fatal(err)
	}
	if all := n.wire("pod"); len(all) != 0 {
		t.Errorf("Wire in another namespace = %v, want no interfaces", all)
	}
	if err := n.RemoveNetns(t.Context(), "pod"); err != nil {
		t.Fatal(err)
	}
	n.unwire("pod")
	if _, err := os.Stat(n.record("pod")); !os.IsNotExist(err) {
		t.Errorf("the record still exists after Unwire: %v", err)
	}
}

// TestTapGone: Wire makes a tap again that another program removed.
func TestTapGone(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	first := n.wire("pod")
	n.must(r.Netns, "ip", "link", "del", first[0].Tap)
	if _, err := tap.Serve(t.Context(), r.Netns, first, tap.Config{}); !errdefs.IsNotFound(err) {
		t.Errorf("Serve without its tap: got error %v, want ErrNotFound", err)
	}
	interfaces := n.wire("pod")
	g := n.guest("pod", interfaces)
	g.static(interfaces)
	n.listener(g.netns, "[::]:80", body(1))
	for _, ip := range r.IPs {
		if got := n.fetch("", netip.AddrPortFrom(ip, 80).String()); got != 1 {
			t.Errorf("got %d bytes from %s, want 1", got, ip)
		}
	}
}

// TestDamagedRecord: Wire reports a damaged record, and Unwire removes it and the taps.
func TestDamagedRecord(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	n.wire("pod")
	if err := os.Truncate(n.record("pod"), 10); err != nil {
		t.Fatal(err)
	}
	if _, err := tap.Wire(t.Context(), r.Netns, tap.Options{Record: n.record("pod")}); !errdefs.IsDataLoss(err) {
		t.Errorf("Wire with a damaged record: got error %v, want ErrDataLoss", err)
	}
	n.unwire("pod")
	if out := n.must(r.Netns, "ip", "link"); strings.Contains(out, "tap0") {
		t.Errorf("a tap remains after Unwire:\n%s", out)
	}
}

func TestErrors(t *testing.T) {
	n := newNode(t, "")
	n.pod("pod")
	if _, err := tap.Wire(t.Context(), n.Netns("pod"), tap.Options{Record: "relative"}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Wire with a relative record path: got error %v, want ErrInvalidArgument", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tap.Wire(ctx, n.Netns("pod"), tap.Options{Record: n.record("pod")}); err == nil {
		t.Error("Wire with a canceled context succeeded")
	}
	if err := tap.Unwire(t.Context(), n.Netns("missing"), n.record("missing")); err != nil {
		t.Errorf("Unwire of a namespace that never existed: %v", err)
	}
	interfaces := n.wire("pod")
	n.must(n.Netns("pod"), "ip", "link", "del", "eth0")
	if _, err := tap.Wire(t.Context(), n.Netns("pod"), tap.Options{Record: n.record("pod")}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Wire without its interface: got error %v, want ErrFailedPrecondition", err)
	}
	if err := n.Check(t.Context(), network.Attachment{ID: "pod"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Check without its interface: got error %v, want ErrFailedPrecondition", err)
	}
	n.must(n.Netns("pod"), "ip", "link", "del", interfaces[0].Tap)
	if _, err := tap.Open(t.Context(), n.Netns("pod"), interfaces[0].Tap); !errdefs.IsNotFound(err) {
		t.Errorf("Open without its tap: got error %v, want ErrNotFound", err)
	}
	n.unwire("pod")
}
