package network

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/network/iptables"
	"github.com/tripod-run/tripod/test/until"
)

const masqueradedByPlugin = `{"cniVersion":"1.0.0","name":"masq","plugins":[{"type":"bridge","bridge":"masq0","isGateway":true,"ipMasq":true,
	"hairpinMode":true,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.99.0.0/16"}]],"dataDir":%q}}]}`

// TestReleaseInBatches: many networks are released together, with their interfaces, rules and leases, whether their
// Teardown was in this process or is the GC of the next one. One whose namespace is gone, one that has lost its interface
// and one without a pod are no hindrance.
func TestReleaseInBatches(t *testing.T) {
	const pods = releaseBatch + 8
	n := newNode(t, nil)
	leases := t.TempDir()
	n.configure("10.conflist", fmt.Sprintf(masqueradedByPlugin, leases))
	t.Cleanup(func() { deleteLink(t, "masq0") })
	addLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "other0"}, PeerName: "other1"})
	for name, release := range map[string]func(){
		"Teardown": func() {
			for i := range pods {
				if err := n.Teardown(t.Context(), podNumber(i)); err != nil {
					t.Fatal(err)
				}
			}
		},
		"GC": func() {
			n.restart()
			if err := n.GC(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for i := range pods {
			n.setup(podNumber(i))
		}
		if err := removeNetns(n.netnsPath("pod-0")); err != nil {
			t.Fatal(err)
		}
		if err := inNetns(n.netnsPath("pod-1"),
			func() error { return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}}) }); err != nil {
			t.Fatal(err)
		}
		release()
		until.Holds(t, name+": all released", func() bool { return n.PendingReleases() == 0 })
		n.assertClean()
		if held := heldLeases(t, leases); len(held) > 0 {
			t.Errorf("%s: leases left: %v", name, held)
		}
	}
	if _, err := netlink.LinkByName("other0"); err != nil {
		t.Errorf("an interface of nobody's pod: %v", err)
	}
}

// TestReleaseGivesWayButNotForever: a release waits while a Setup is under way, and happens in the end even if there is
// always one.
func TestReleaseGivesWayButNotForever(t *testing.T) {
	n := newNode(t, nil)
	n.setup(Attachment{ID: "pod"})
	end := n.setups.begin()
	defer end()
	if err := n.Teardown(t.Context(), Attachment{ID: "pod"}); err != nil {
		t.Fatal(err)
	}
	if n.setups.quiet(0) {
		t.Error("the release need not give way")
	}
	if pending := n.PendingReleases(); pending > 1 {
		t.Errorf("PendingReleases = %d, want 1 or, after the release, 0", pending)
	}
	n.awaitReleased("pod")
	until.Holds(t, "no release is pending", func() bool { return n.PendingReleases() == 0 })
	n.assertClean()
}

// TestRestoreTogether: concurrent changes of rules are all applied, and a bad one fails alone.
func TestRestoreTogether(t *testing.T) {
	const callers = 24
	errs := make([]error, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			chain := fmt.Sprintf("TOGETHER-%d", i)
			lines := []string{":" + chain + " - [0:0]", "-A " + chain + " -d 192.0.2.1 -j RETURN"}
			if i == 7 {
				lines = append(lines, "-A "+chain+" -j NO-SUCH-CHAIN")
			}
			errs[i] = iptables.Restore(t.Context(), iptables.V4, iptables.NAT, lines...)
		})
	}
	all.Wait()
	for i, err := range errs {
		chain := fmt.Sprintf("TOGETHER-%d", i)
		if (err != nil) != (i == 7) {
			t.Errorf("Restore of %s = %v, want an error only for the bad change", chain, err)
		}
		saved, err := iptables.Save(t.Context(), iptables.V4)
		rules, there := saved[iptables.NAT].Rules[chain]
		if i == 7 {
			if there {
				t.Errorf("the bad change was applied in part: %v", rules)
			}
			continue
		}
		if want := []string{"-d 192.0.2.1/32 -j RETURN"}; err != nil || !slices.Equal(rules, want) {
			t.Errorf("rules of %s = %v, %v, want %v", chain, rules, err, want)
		}
		if err := iptables.Restore(t.Context(), iptables.V4, iptables.NAT, "-F "+chain, "-X "+chain); err != nil {
			t.Error(err)
		}
	}
}

func podNumber(i int) Attachment { return Attachment{ID: fmt.Sprintf("pod-%d", i)} }

func addLink(t testing.TB, link netlink.Link) {
	t.Helper()
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { deleteLink(t, link.Attrs().Name) })
}

func deleteLink(t testing.TB, name string) {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		t.Error(err)
	}
}

// heldLeases returns the addresses that host-local has leased in the network masq.
func heldLeases(t testing.TB, dir string) (addresses []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "masq"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "10.99.") {
			addresses = append(addresses, e.Name())
		}
	}
	return addresses
}
