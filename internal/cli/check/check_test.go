package check

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/health"
)

// goodHost returns a host that passes all checks, made of files below a test directory.
func goodHost(t *testing.T) Host {
	t.Helper()
	dir := t.TempDir()
	write := func(path, text string, mode os.FileMode) {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/sys/kernel/osrelease", "6.1.0-18-amd64\n", 0o600)
	write("proc/sys/kernel/seccomp/actions_avail", "kill_process errno allow\n", 0o600)
	for _, kind := range []string{"mnt", "net", "pid", "ipc", "uts", "cgroup", "user"} {
		write("proc/self/ns/"+kind, "", 0o600)
	}
	for _, name := range []string{"loopback", "bridge", "host-local", "portmap"} {
		write("cni/"+name, "#!/bin/true\n", 0o700)
	}
	c := config.Default()
	c.Network.ConfDir, c.Network.BinDirs = filepath.Join(dir, "net.d"), []string{filepath.Join(dir, "cni")}
	c.Root = filepath.Join(dir, "root", "not", "there", "yet")
	return Host{
		Proc: filepath.Join(dir, "proc"), Config: c,
		Overlay: func(at string) error {
			if at != dir {
				return errors.New("tried below " + at)
			}
			return nil
		},
		NAT:        func(context.Context) error { return nil },
		Forwarding: func(context.Context) error { return nil },
		Statfs:     func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Bsize: 4096, Bavail: 10 << 20}, nil },
		FileLimit:  func() (uint64, error) { return 1 << 20, nil },
		Clock:      func() (time.Time, bool) { return time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC), true },
		LoopbackUp: func() bool { return true },
		UplinkMTU:  func() (int, error) { return 1500, nil },
		DNS: func() (*runtimeapi.DNSConfig, string, error) {
			return &runtimeapi.DNSConfig{Servers: []string{"192.0.2.1"}}, "", nil
		},
	}
}

func TestGoodHost(t *testing.T) {
	findings := goodHost(t).Findings(t.Context())
	for _, f := range findings {
		if !f.OK {
			t.Errorf("%s: got OK = false (%s), want true", f.Subject, f.Detail)
		}
	}
	if len(findings) < 12 {
		t.Errorf("got %d findings, want at least 12", len(findings))
	}
}

func TestEachFault(t *testing.T) {
	for _, test := range []struct {
		name, subject, level, detail string
		spoil                        func(t *testing.T, h *Host)
	}{
		{"not root", "root", "error", "uid 1000", func(_ *testing.T, h *Host) { h.UID = 1000 }},
		{"old kernel", "kernel", "error", "openat2", func(t *testing.T, h *Host) { put(t, h.Proc+"/sys/kernel/osrelease", "4.19.0-3") }},
		{"middling kernel", "kernel", "note", "recursive read-only",
			func(t *testing.T, h *Host) { put(t, h.Proc+"/sys/kernel/osrelease", "5.10.0") }},
		{"strange kernel", "kernel", "note", "no version", func(t *testing.T, h *Host) { put(t, h.Proc+"/sys/kernel/osrelease", "next") }},
		{"no procfs", "kernel", "error", "no such file", func(_ *testing.T, h *Host) { h.Proc = "/does/not/exist" }},
		{"no pid namespaces", "namespaces", "error", "missing: pid", func(t *testing.T, h *Host) { drop(t, h.Proc+"/self/ns/pid") }},
		{"no user namespaces", "namespaces", "note", "missing: user", func(t *testing.T, h *Host) { drop(t, h.Proc+"/self/ns/user") }},
		{"no seccomp", "seccomp", "error", "RuntimeDefault", func(t *testing.T, h *Host) { drop(t, h.Proc+"/sys/kernel/seccomp/actions_avail") }},
		{"no overlay", "overlayfs", "error", "on an overlay", func(_ *testing.T, h *Host) {
			h.Overlay = func(string) error { return errors.New("on an overlay") }
		}},
		{"full disk", "disk", "error", "0.0 GiB free", func(_ *testing.T, h *Host) {
			h.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Bsize: 4096, Bavail: 10}, nil }
		}},
		{"smallish disk", "disk", "note", "1.0 GiB free", func(_ *testing.T, h *Host) {
			h.Statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{Bsize: 1 << 30, Bavail: 1}, nil }
		}},
		{"no inodes", "disk", "error", "only 3 of 1000 inodes", func(_ *testing.T, h *Host) {
			h.Statfs = func(string) (unix.Statfs_t, error) {
				return unix.Statfs_t{Bsize: 1 << 30, Bavail: 100, Files: 1000, Ffree: 3}, nil
			}
		}},
		{"noexec disk", "disk", "error", "noexec", func(_ *testing.T, h *Host) {
			h.Statfs = func(string) (unix.Statfs_t, error) {
				return unix.Statfs_t{Bsize: 1 << 30, Bavail: 100, Flags: unix.ST_NOEXEC}, nil
			}
		}},
		{"few files", "open files", "error", "limit 256", func(_ *testing.T, h *Host) {
			h.FileLimit = func() (uint64, error) { return 256, nil }
		}},
		{"loopback down", "loopback", "error", "exec", func(_ *testing.T, h *Host) { h.LoopbackUp = func() bool { return false } }},
		{"no NAT", "NAT", "note", "no table", func(_ *testing.T, h *Host) {
			h.NAT = func(context.Context) error { return errors.New("no table nat") }
		}},
		{"firewall", "firewall", "note", "drops pods", func(_ *testing.T, h *Host) {
			h.Forwarding = func(context.Context) error { return errors.New("the firewall\ndrops pods") }
		}},
		{"only a stub resolver", "name servers", "note", "no name server", func(_ *testing.T, h *Host) {
			h.DNS = func() (*runtimeapi.DNSConfig, string, error) { return nil, "pods have no name server", nil }
		}},
		{"large MTU", "MTU", "note", "9000", func(_ *testing.T, h *Host) { h.Config.Network.Default.MTU = 9000 }},
		{"large MTU of a plugin", "MTU", "note", "9000", func(t *testing.T, h *Host) {
			put(t, h.Config.Network.ConfDir+"/10-net.conflist",
				`{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","mtu":9000},{"type":"portmap"}]}`)
		}},
		{"default MTU of a plugin", "MTU", "note", "1500", func(t *testing.T, h *Host) {
			h.UplinkMTU = func() (int, error) { return 1400, nil }
			put(t, h.Config.Network.ConfDir+"/10-net.conf", `{"cniVersion":"1.0.0","name":"n","type":"ptp"}`)
		}},
		{"no netlink", "MTU", "note", "broken",
			func(_ *testing.T, h *Host) { h.UplinkMTU = func() (int, error) { return 0, errors.New("broken") } }},
		{"unsynchronised clock", "clock", "note", "not synchronised", func(_ *testing.T, h *Host) {
			h.Clock = func() (time.Time, bool) { return time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC), false }
		}},
		{"clock of 1970", "clock", "error", "1970-01-01", func(_ *testing.T, h *Host) {
			h.Clock = func() (time.Time, bool) { return time.Unix(0, 0), true }
		}},
		{"plugin missing", "CNI plugins", "error", "portmap not found",
			func(t *testing.T, h *Host) { drop(t, h.Config.Network.BinDirs[0]+"/portmap") }},
		{"plugin not executable", "CNI plugins", "error", "bridge not found", func(t *testing.T, h *Host) {
			if err := os.Chmod(h.Config.Network.BinDirs[0]+"/bridge", 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"configuration names a plugin that is missing", "CNI plugins", "error", "tuning not found", func(t *testing.T, h *Host) {
			put(t, h.Config.Network.ConfDir+"/10-net.conflist",
				`{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","ipam":{"type":"host-local"}},{"type":"tuning"}]}`)
		}},
		{"configuration broken", "CNI configuration", "error", "10-net.conflist", func(t *testing.T, h *Host) {
			put(t, h.Config.Network.ConfDir+"/10-net.conflist", `{"cniVersion`)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := goodHost(t)
			test.spoil(t, &h)
			for _, f := range h.Findings(t.Context()) {
				if f.Subject != test.subject {
					continue
				}
				if f.Level() != test.level || !strings.Contains(f.Detail, test.detail) {
					t.Errorf("got level %s and detail %q, want %s and %q", f.Level(), f.Detail, test.level, test.detail)
				}
				if f.Remedy == "" {
					t.Error("the finding has no remedy")
				}
				return
			}
			t.Errorf("no finding has the subject %q", test.subject)
		})
	}
}

func TestFirstCNIConfigurationApplies(t *testing.T) {
	h := goodHost(t)
	put(t, h.Config.Network.ConfDir+"/20-b.conflist", `{"cniVersion`)
	put(t, h.Config.Network.ConfDir+"/10-a.conf", `{"cniVersion":"1.0.0","name":"n","type":"bridge","ipam":{"type":"host-local"}}`)
	for _, f := range h.network() {
		if !f.OK {
			t.Errorf("%s: got OK = false (%s), want true", f.Subject, f.Detail)
		}
	}
}

// TestSystem checks the machine that runs the tests, which the e2e tests require anyway.
func TestSystem(t *testing.T) {
	c := config.Default()
	c.Root = t.TempDir()
	h := System(c, nil)
	for _, f := range []health.Finding{h.root(), h.kernel(), h.namespaces(), h.seccomp(), h.overlay(), h.nat(t.Context())} {
		if !f.OK {
			t.Errorf("%s: got OK = false (%s), want true", f.Subject, f.Detail)
		}
	}
	if left, err := os.ReadDir(c.Root); err != nil || len(left) > 0 {
		t.Errorf("files after the checks: got %v, %v; want none", left, err)
	}
}

func TestPrint(t *testing.T) {
	var out bytes.Buffer
	findings := []health.Finding{
		{Subject: "a", OK: true, Required: true, Detail: "fine", Remedy: "none needed"},
		{Subject: "bb", Detail: "two\nlines", Remedy: "do this"},
		{Subject: "c", Required: true, Detail: "bad", Remedy: "do that"},
	}
	if err := Print(&out, findings); err != nil {
		t.Fatal(err)
	}
	want := "ok     a   fine\nnote   bb  two lines\n           → do this\nerror  c   bad\n           → do that\n\n" +
		"This host cannot run pods yet: 1 of 3 findings are errors (1 notes).\n"
	if out.String() != want {
		t.Errorf("Print: got\n%q\nwant\n%q", out.String(), want)
	}
	text, err := json.Marshal(findings[2])
	if err != nil || !strings.Contains(string(text), `"level":"error"`) {
		t.Errorf("JSON: got %s, %v; want the level", text, err)
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func drop(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}
