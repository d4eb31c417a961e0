package machinetest

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

// Taps is the Opener for the drivers under test.
type Taps struct{}

func (Taps) Tap(ctx context.Context, nic machine.NIC) (*os.File, error) {
	return tap.Open(ctx, nic.Netns, nic.Tap)
}

// network checks that a guest uses its taps with the given addresses and MTUs, before and after a restart of the
// machine, and that a missing tap makes the start fail (fault V3).
func network(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	const netns = "/proc/self/ns/net"
	var served []tap.Interface
	for i, name := range []string{"mtest0", "mtest1"} {
		addTap(t, name, s.UID, "10.77."+itoa(i)+".1/24")
		nic := machine.NIC{MAC: "52:54:00:77:00:0" + itoa(i), MTU: 1400, Netns: netns, Tap: name}
		d.NICs = append(d.NICs, nic)
		served = append(served, tap.Interface{
			Link: name, Tap: name, MAC: nic.MAC, MTU: nic.MTU, Addrs: []netip.Prefix{netip.MustParsePrefix("10.77." + itoa(i) + ".2/24")},
		})
	}
	dhcp, err := tap.Serve(t.Context(), netns, served, tap.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer dhcp.Close()
	d.Cmdline += ` tripod.run="cat /sys/class/net/eth?/address /sys/class/net/eth?/mtu; echo net-is-up"`
	l.Boot(t, d)
	for run := range 2 {
		AwaitLog(t, d, "net-is-up", run+1)
		for _, host := range []string{"10.77.0.2", "10.77.1.2"} {
			fetch(t, host)
		}
		if run == 0 {
			must(t, l.Destroy(t.Context(), d.Name))
			must(t, l.Start(t.Context(), d.Name))
		}
	}
	for _, text := range []string{"52:54:00:77:00:00", "52:54:00:77:00:01", "\n1400\r\n1400"} {
		AwaitLog(t, d, text, 1)
	}
	must(t, l.Destroy(t.Context(), d.Name))
	link, err := netlink.LinkByName("mtest1")
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Start(t.Context(), d.Name); err == nil || l.MustState(d.Name).Cause != machine.CauseStart {
		t.Errorf("Start without its tap: got error %v and state %+v, want an error and cause start", err, l.MustState(d.Name))
	}
	must(t, l.Undefine(t.Context(), d.Name))
}

// addTap makes a persistent tap with the given address, and removes the tap when the test ends.
func addTap(t *testing.T, name string, uid int, address string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, 1400
	link := &netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TAP, Owner: uint32(uid),
		Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_VNET_HDR}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatalf("tap %s: %v", name, err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	addr, err := netlink.ParseAddr(address)
	if err == nil {
		err = netlink.AddrAdd(link, addr)
	}
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		t.Fatalf("tap %s: %v", name, err)
	}
}

// fetch reads a page from the guest's HTTP server.
func fetch(t *testing.T, host string) {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext}}
	Await(t, "the guest's HTTP server answers at "+host, func() bool {
		answer, err := client.Get("http://" + host + "/")
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		return err == nil && answer.StatusCode == http.StatusOK && len(body) > 0
	})
}
