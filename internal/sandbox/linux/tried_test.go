package linux

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
)

// TestTried: Open does not try a runtime whose results are known, and uses these. It tries all other versions.
func TestTried(t *testing.T) {
	crun, err := exec.LookPath("crun")
	if err != nil {
		t.Fatal(err)
	}
	version, err := exec.Command(crun, "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(version), "\n")
	r := newRig(t, "crun")
	calls := filepath.Join(t.TempDir(), "calls")
	program := filepath.Join(t.TempDir(), "crun")
	script := fmt.Sprintf("#!/bin/sh\necho \"$@\" >>%s\nexec %s \"$@\"\n", calls, crun)
	if err := os.WriteFile(program, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	open := func(known oci.Tried) (oci.Runtime, []string) {
		cfg := r.cfg
		cfg.Runtime, cfg.Tried, cfg.NoUserNamespaces = program, []oci.Tried{known}, true
		b, err := Open(context.Background(), cfg, Services{Images: r.images, Logger: r.log})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		if err := b.users.Reason(); !errdefs.IsNotImplemented(err) || b.Capabilities().UserNamespaces {
			t.Errorf("user namespaces: got the reason %v and capabilities %+v, want that there are none", err, b.Capabilities())
		}
		raw, err := os.ReadFile(calls)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(calls); err != nil {
			t.Fatal(err)
		}
		return b.runtime, strings.Split(strings.TrimSpace(string(raw)), "\n")
	}
	tried, made := open(oci.Tried{Version: "crun version 0.0.0"})
	if n := len(slices.DeleteFunc(made, func(call string) bool { return !strings.Contains(call, " create ") })); n != 1 {
		t.Errorf("a runtime with another version: got %d trial containers, want 1", n)
	}
	known, made := open(oci.Tried{Version: line, Releases: !tried.Releases, RecursiveReadOnly: tried.RecursiveReadOnly})
	if !slices.Equal(made, []string{"--version"}) || known.Releases == tried.Releases {
		t.Errorf("a runtime whose results are known: got calls %q and that it releases is %t, want only --version, and what is known", made,
			known.Releases)
	}
}

// TestDebianCrun: what is said about the crun of the guest is what its trial shows.
func TestDebianCrun(t *testing.T) {
	r := newRig(t, "crun")
	if r.runtime.Version != DebianCrun[0].Version {
		t.Skipf("this machine has %s, and the guest %s", r.runtime.Version, DebianCrun[0].Version)
	}
	if got := r.runtime.Tried; got != DebianCrun[0] {
		t.Errorf("trial of crun: got %+v, want %+v", got, DebianCrun[0])
	}
}
