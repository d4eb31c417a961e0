package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

func TestStats(t *testing.T) {
	n := newNode(t, nil)
	r := n.setup(Attachment{ID: "pod"})
	n.serve(r.Netns, "0.0.0.0:80", strings.Repeat("x", 100_000))
	before, err := n.Stats(r.Netns)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.ask("", r.IPs[0].String()+":80"); err != nil {
		t.Fatal(err)
	}
	after, err := n.Stats(r.Netns)
	if err != nil {
		t.Fatal(err)
	}
	if len(after) != 1 || after[0].Name != "eth0" || after[0].TxBytes-before[0].TxBytes < 100_000 ||
		after[0].RxPackets <= before[0].RxPackets {
		t.Errorf("counters of eth0 went from %+v to %+v, want at least 100000 bytes more sent and more packets received", before, after)
	}
	n.teardown(Attachment{ID: "pod"})
	if _, err := n.Stats(r.Netns); !errdefs.IsNotFound(err) {
		t.Errorf("Stats after Teardown = %v, want not found", err)
	}
}

// TestTeardownInBackground: Teardown of a chain that runs in this process returns before the release is complete. Until
// then nobody else gets the address, and another daemon can complete the release.
func TestTeardownInBackground(t *testing.T) {
	n := newNode(t, nil)
	first := n.setup(Attachment{ID: "first"})
	lock, err := os.Open(filepath.Join(n.leasesDir(), defaultNetworkName, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil { // holds up the release
		t.Fatal(err)
	}
	if err := n.Teardown(t.Context(), Attachment{ID: "first"}); err != nil {
		t.Fatal(err)
	}
	if rec, err := n.records.get("first"); rec == nil || err != nil {
		t.Errorf("the record of an incomplete release = %v, %v; want it to stay", rec, err)
	}
	if leases := n.leases(); !slices.Equal(leases, []string{first.IPs[0].String()}) {
		t.Errorf("leases during the release: %v, want %s", leases, first.IPs[0])
	}
	n.restart() // gives the release up after closePatience
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := n.GC(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	n.assertClean()
}

func TestNetnsStaysOffTheProcess(t *testing.T) {
	n := newNode(t, nil)
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		id := fmt.Sprintf("ns-%d", i)
		path, err := n.NewNetns(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Stats(path); err != nil {
			t.Fatal(err)
		}
		if err := n.RemoveNetns(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "all threads in the host's namespace", func() bool {
		for _, task := range tasks {
			ns, err := os.Readlink("/proc/self/task/" + task.Name() + "/ns/net")
			if err == nil && ns != home {
				return false
			}
		}
		return true
	})
	n.assertClean()
}

func TestKeys(t *testing.T) {
	seen := map[string]string{}
	for _, id := range []string{
		strings.Repeat("a1", 32), "pod", "Pod", "a:b", "a_b", "example.com:foo.Bar@1.2.3#0", "example.com:foo.Bar@1.2.3#1",
		strings.Repeat("x", 300), hashedPrefix + "forged", keyOf("a:b"), "-x", ".", "..", "",
	} {
		key := keyOf(id)
		if !containerIDs().MatchString(key) || len(key) > maxPlainKey || key != keyOf(id) {
			t.Errorf("keyOf(%q) = %q, want a stable container ID of at most %d bytes", id, key, maxPlainKey)
		}
		if other, ok := seen[key]; ok {
			t.Errorf("IDs %q and %q share the key %q", id, other, key)
		}
		seen[key] = id
	}
}

func TestConfigIsValidated(t *testing.T) {
	for name, c := range map[string]Config{
		"relative": {CacheDir: "cni"},
		"not CIDR": {Default: DefaultNetwork{SubnetV4: "10.0.0.0"}},
		"family":   {Default: DefaultNetwork{SubnetV4: "fd00::/64"}},
		"bridge":   {Default: DefaultNetwork{Bridge: "a-name-of-more-than-15-bytes"}},
	} {
		if _, err := New(c); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: New = %v, want an invalid argument", name, err)
		}
	}
}
