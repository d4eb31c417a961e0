package linux

import (
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// TestRelease: a container of crun is started without crun, and crun then takes it for running. Of a container whose
// init has ended, release says so.
func TestRelease(t *testing.T) {
	r := newRig(t, "crun")
	if !r.runtime.releases || r.runtime.sealed == nil {
		t.Fatalf("got releases %v and sealed %v, want both", r.runtime.releases, r.runtime.sealed)
	}
	p := r.pod()
	create := func() (id string, got launched) {
		t.Helper()
		c := p.container(forever)
		h, _ := r.ledger.Find(p.ID, c.ID)
		if _, err := r.prepareStart(t.Context(), p.Pod, c.Container, h); err != nil {
			t.Fatal(err)
		}
		s, _ := h.Snapshot()
		got, err := r.conmon.start(t.Context(), launch{id: c.ID, bundle: r.bundleOf(h), logPath: s.LogPath}, r.Backend.cfg, r.runtime)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = got.init.Signal(unix.SIGKILL)
			<-got.conmon.Dead
			got.init.Close()
		})
		return c.ID, got
	}

	id, _ := create()
	if r.runtime.started(t.Context(), id) || !r.runtime.waitsForRelease(id) {
		t.Fatal("the created container does not wait")
	}
	if err := r.runtime.release(id); err != nil {
		t.Fatal(err)
	}
	if !r.runtime.started(t.Context(), id) || r.runtime.waitsForRelease(id) {
		t.Error("the released container is not running")
	}

	id, got := create()
	_ = got.init.Signal(unix.SIGKILL)
	<-got.init.Dead
	if err := r.runtime.start(t.Context(), id, false); err == nil {
		t.Error("an ended container was started")
	}
}

// TestPoststartHooks: a container with poststart hooks is started by the runtime, which runs them.
func TestPoststartHooks(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c, marker := p.container(forever), filepath.Join(t.TempDir(), "ran")
		bundle := r.cfg.bundle(p.ID, c.ID)
		config, err := readConfig(bundle)
		if err != nil {
			t.Fatal(err)
		}
		// The hook reads its input, because crun dies of SIGPIPE if the hook ends first.
		config.Hooks = &specs.Hooks{Poststart: []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "cat >" + marker}}}}
		if err := ledger.WriteJSON(configFile(bundle), config); err != nil {
			t.Fatal(err)
		}
		c.start()
		if !exists(marker) {
			t.Error("the hook did not run")
		}
	})
}
