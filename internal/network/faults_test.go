package network

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/until"
)

// withFault configures the default network with the plugin "fault" last, so that the address and the interface already
// exist when it fails.
func withFault(n *node) {
	n.configure("10-fault.conflist", `{"cniVersion":"1.0.0","name":"tripod","plugins":[
		{"type":"bridge","bridge":"`+n.cfg.Default.Bridge+`","isGateway":true,
		 "ipam":{"type":"host-local","dataDir":"`+n.leasesDir()+`","ranges":[[{"subnet":"10.89.0.0/24"}]]}},
		{"type":"fault"}]}`)
}

// passOn ends the script of a fault plugin that succeeds: it prints the previous result.
const passOn = `
sed -n 's/.*"prevResult":\({.*}\),"type".*/\1/p' <<END
$stdin
END
`

// readInput begins the script of a fault plugin that ends with passOn.
const readInput = "stdin=$(cat)\n"

func TestFaultN4AddFails(t *testing.T) {
	n := newNode(t, nil)
	n.plugin("fault", `
[ $CNI_COMMAND = ADD ] || exit 0
echo "what the plugin logged" >&2
echo '{"cniVersion":"1.0.0","code":11,"msg":"no more of it","details":"come back later"}'
exit 1`)
	withFault(n)
	_, err := n.Setup(t.Context(), Attachment{ID: "pod"})
	var plugin *PluginError
	if !errors.As(err, &plugin) || plugin.Code != 11 || plugin.Command != "ADD" || !errdefs.IsUnavailable(err) {
		t.Fatalf("Setup = %v, want a PluginError of ADD with code 11", err)
	}
	for _, part := range []string{"no more of it", "come back later", "what the plugin logged", "fault"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not contain %q: %v", part, err)
		}
	}
	n.assertClean()
}

func TestFaultN4AddPrintsJunk(t *testing.T) {
	for name, script := range map[string]string{
		"text":    `echo "all is well"`,
		"nothing": `true`,
		"null":    `echo null`,
		"garbage": `head -c 100000 /dev/urandom`,
		"endless": `while :; do echo '{"cniVersion":"1.0.0","ips":[],"padding":"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}'; done`,
		"other":   `echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.1/24","interface":7}]}'`,
		"address": `echo '{"cniVersion":"1.0.0","ips":[{"address":"nowhere"}]}'`,
		"nulls":   `echo '{"cniVersion":"0.4.0","interfaces":[null],"ips":[null],"routes":[null]}'`,
		"crash":   `kill -SEGV $$`,
		"failure": `echo "<html>" ; exit 3`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, nil)
			n.plugin("fault", "[ $CNI_COMMAND = ADD ] || exit 0\n"+script)
			withFault(n)
			_, err := n.Setup(t.Context(), Attachment{ID: "pod"})
			if err == nil || len(err.Error()) > 2000 {
				t.Errorf("Setup = %v, want an error of at most 2000 bytes", err)
			}
			n.assertClean()
		})
	}
}

// TestFaultN4AddHangs checks that a hanging plugin and its children are killed after the plugin timeout, or when the
// caller's context ends.
func TestFaultN4AddHangs(t *testing.T) {
	for name, c := range map[string]struct{ plugin, caller time.Duration }{
		"plugin timeout": {300 * time.Millisecond, time.Minute},
		"caller":         {time.Minute, 300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(cfg *Config) { cfg.PluginTimeout = c.plugin })
			pids := filepath.Join(t.TempDir(), "pids")
			n.plugin("fault", `
[ $CNI_COMMAND = ADD ] || exit 0
sleep 1000 &
echo $$ $! > `+pids+`
wait`)
			withFault(n)
			ctx, cancel := context.WithTimeout(t.Context(), c.caller)
			defer cancel()
			start := time.Now()
			_, err := n.Setup(ctx, Attachment{ID: "pod"})
			if !errdefs.IsDeadlineExceeded(err) || time.Since(start) > 10*time.Second {
				t.Errorf("Setup returned %v after %s, want DeadlineExceeded within 10 s", err, time.Since(start))
			}
			n.assertClean()
			data, err := os.ReadFile(pids)
			if err != nil {
				t.Fatal(err)
			}
			for pid := range strings.FieldsSeq(string(data)) {
				eventually(t, 5*time.Second, "the end of process "+pid, func() bool { return !running(pid) })
			}
		})
	}
}

// running reports whether a process exists and is not a zombie.
func running(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func TestFaultN4PluginLeavesHelperBehind(t *testing.T) {
	n := newNode(t, nil)
	pid := filepath.Join(t.TempDir(), "pid")
	n.plugin("fault", readInput+`
[ $CNI_COMMAND = ADD ] || exit 0
sleep 1000 & echo $! > `+pid+passOn)
	withFault(n)
	r := n.setup(Attachment{ID: "pod"}) // the helper holds stdout open
	if len(r.IPs) != 1 {
		t.Errorf("Setup = %+v, want a result with one address", r)
	}
	data, err := os.ReadFile(pid)
	if err != nil {
		t.Fatal(err)
	}
	helper, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if !running(strconv.Itoa(helper)) {
		t.Error("the helper of a successful plugin was killed")
	}
	_ = unix.Kill(helper, unix.SIGKILL)
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}

// failDel installs a fault plugin whose DEL fails while the file exists.
func failDel(n *node, file string) {
	n.plugin("fault", readInput+"[ $CNI_COMMAND = DEL ] && [ -e "+file+" ] && { echo broken >&2; exit 1; }\n"+passOn)
}

func TestFaultN4DelFails(t *testing.T) {
	n := newNode(t, nil)
	broken := filepath.Join(t.TempDir(), "broken")
	failDel(n, broken)
	withFault(n)
	n.setup(Attachment{ID: "pod"})
	if err := os.WriteFile(broken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := n.Teardown(t.Context(), Attachment{ID: "pod"}); !errdefs.IsUnavailable(err) {
			t.Fatalf("Teardown = %v, want unavailable", err)
		}
		if len(n.leases()) != 1 || !n.Present("pod") {
			t.Fatal("Teardown released the lease or the namespace although DEL failed")
		}
		n.restart()
	}
	if err := n.GC(t.Context(), nil); err == nil {
		t.Error("GC does not report that DEL failed")
	}
	if err := os.Remove(broken); err != nil {
		t.Fatal(err)
	}
	if err := n.GC(t.Context(), nil); err != nil {
		t.Error(err)
	}
	n.assertClean()
}

func TestFaultN4RollbackFailsThenSucceeds(t *testing.T) {
	n := newNode(t, nil)
	broken := filepath.Join(t.TempDir(), "broken")
	if err := os.WriteFile(broken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.plugin("fault", "[ -e "+broken+" ] && exit 1\nexit 0")
	withFault(n)
	if _, err := n.Setup(t.Context(), Attachment{ID: "pod"}); err == nil || !strings.Contains(err.Error(), "background") {
		t.Fatalf("Setup = %v, want an error that mentions the roll-back in the background", err)
	}
	if len(n.leases()) != 1 {
		t.Fatal("Setup released the lease although DEL failed")
	}
	if err := os.Remove(broken); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the roll-back in the background", func() bool {
		keys, err := n.records.keys()
		return err == nil && len(keys) == 0
	})
	n.assertClean()
}

func TestFailPoints(t *testing.T) {
	failpoint.Needed(t)
	n := newNode(t, nil)
	arm := func(name, spec string) {
		t.Helper()
		if err := failpoint.Arm(name, spec); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = failpoint.Arm(name, "") })
	}
	for _, name := range []string{"network.setup.netns", "network.setup.add", "network.bridge.add.leased", "network.bridge.add.paired",
		"network.bridge.add.configured"} {
		arm(name, "1*error(made to fail)")
		if _, err := n.Setup(t.Context(), Attachment{ID: "pod"}); err == nil || !strings.Contains(err.Error(), "made to fail") {
			t.Errorf("Setup with fail point %s = %v, want its error", name, err)
		}
		n.assertClean()
	}
	for _, name := range []string{"network.bridge.del.unlinked", "network.teardown.del"} {
		n.setup(Attachment{ID: "pod"})
		arm(name, "1*error(made to fail)")
		n.teardown(Attachment{ID: "pod"}) // fails in the background, and is retried there
		n.assertClean()
	}
}

// TestFirstSetupFails: the bridge of a first Setup that failed has lost its only port, and with it its hardware address.
// The next Setup succeeds nevertheless, and later ports do not change the address.
func TestFirstSetupFails(t *testing.T) {
	failpoint.Needed(t)
	n := newNode(t, nil)
	if err := failpoint.Arm("network.bridge.add.configured", "1*error(made to fail)"); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Setup(t.Context(), Attachment{ID: "first"}); err == nil || !strings.Contains(err.Error(), "made to fail") {
		t.Fatalf("Setup = %v, want the fail point's error", err)
	}
	var before string
	for _, id := range []string{"second", "third"} {
		now := n.setup(Attachment{ID: id}).Interfaces[0].MAC
		if before = cmp.Or(before, now); now == "" || now != before {
			t.Errorf("hardware address of the bridge with pod %s: got %q, want %q", id, now, before)
		}
	}
}

// TestFaultN1DaemonKilled kills a daemon at each fail point and during a plugin, and checks that the next daemon cleans
// up.
func TestFaultN1DaemonKilled(t *testing.T) {
	failpoint.Needed(t)
	for _, point := range []string{
		"network.setup.netns", "network.setup.add", "network.bridge.add.leased", "network.bridge.add.paired",
		"network.bridge.add.configured", "network.bridge.del.marked", "network.bridge.del.unlinked", "network.teardown.del",
	} {
		t.Run(point, func(t *testing.T) {
			n := newNode(t, nil)
			if strings.Contains(point, "del") {
				n.setup(Attachment{ID: "pod"})
			}
			_ = n.Close()
			if ended := runDaemon(t, n, point+"=kill").Wait(); ended == nil || ended.Error() != "signal: killed" {
				t.Fatalf("the daemon ended with %v, want signal: killed", ended)
			}
			n.start()
			if err := n.GC(t.Context(), nil); err != nil {
				t.Error(err)
			}
			n.assertClean()
		})
	}
	t.Run("plugin", func(t *testing.T) {
		n := newNode(t, nil)
		pid := filepath.Join(t.TempDir(), "pid")
		n.plugin("fault", "[ $CNI_COMMAND = ADD ] || exit 0\necho $$ > "+pid+".tmp; mv "+pid+".tmp "+pid+"; exec sleep 1000")
		withFault(n)
		_ = n.Close()
		daemon := runDaemon(t, n, "")
		var data []byte
		eventually(t, 10*time.Second, "the start of the plugin", func() bool { data, _ = os.ReadFile(pid); return len(data) > 0 })
		if err := daemon.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = daemon.Wait()
		eventually(t, 5*time.Second, "the end of the plugin", func() bool { return !running(strings.TrimSpace(string(data))) })
		n.start()
		n.teardown(Attachment{ID: "pod"})
		n.assertClean()
	})
}

func TestDamagedRecord(t *testing.T) {
	n := newNode(t, nil)
	n.setup(Attachment{ID: "pod#1"})
	if err := os.WriteFile(n.records.path(keyOf("pod#1")), nil, 0o600); err != nil { // as after a power loss
		t.Fatal(err)
	}
	n.restart()
	n.teardown(Attachment{ID: "pod#1"})
	n.assertClean()

	n.setup(Attachment{ID: "pod"})
	if err := os.WriteFile(n.records.path("pod"), []byte(`{"version":99,"id":"pod"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.Teardown(t.Context(), Attachment{ID: "pod"}); err == nil || !strings.Contains(err.Error(), "version 99") {
		t.Errorf("Teardown with a record of version 99 = %v, want an error that mentions the version", err)
	}
	if len(n.leases()) != 1 {
		t.Error("Teardown released the lease despite the unknown version of the record")
	}
}

func TestSetupWaitsForItsTurn(t *testing.T) {
	n := newNode(t, nil)
	unlock, err := n.locks.lock(t.Context(), "pod")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := n.Setup(ctx, Attachment{ID: "pod"}); !errdefs.IsDeadlineExceeded(err) {
		t.Errorf("Setup while the pod is locked = %v, want DeadlineExceeded", err)
	}
	n.setup(Attachment{ID: "other"}) // does not wait
	unlock()
	n.setup(Attachment{ID: "pod"})
	n.teardown(Attachment{ID: "pod"})
	n.teardown(Attachment{ID: "other"})
	n.assertClean()
	until.Holds(t, "no lock is left", func() bool {
		n.locks.mu.Lock()
		defer n.locks.mu.Unlock()
		return len(n.locks.held) == 0
	})
}

// TestFaultN5DiskFull checks that Setup on a full disk leaves nothing behind, that a daemon with a full disk starts and
// can tear down pods, and that Setup works again once there is room.
func TestFaultN5DiskFull(t *testing.T) {
	n := newNode(t, nil)
	_ = n.Close()
	if err := unix.Mount("tmpfs", n.cfg.CacheDir, "tmpfs", 0, "size=128k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(n.cfg.CacheDir, unix.MNT_DETACH)
	n.start()
	n.setup(Attachment{ID: "before"})
	ballast := filepath.Join(n.cfg.CacheDir, "ballast")
	file, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = file.Write(make([]byte, 512))
	}
	_ = file.Close()

	if _, err := n.Setup(t.Context(), Attachment{ID: "pod"}); !errdefs.IsResourceExhausted(err) {
		t.Errorf("Setup on a full disk = %v, want resource exhausted", err)
	}
	if n.Present("pod") {
		t.Error("Setup left the namespace")
	}
	n.restart()
	n.teardown(Attachment{ID: "before"})
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	n.setup(Attachment{ID: "pod"})
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}
