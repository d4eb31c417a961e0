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
		got = c.launch()
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

// TestHooks: the runtime runs the hooks of a container after its start and after its end, whatever we do for it otherwise.
func TestHooks(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c, dir := p.container(forever), t.TempDir()
		started, stopped := filepath.Join(dir, "started"), filepath.Join(dir, "stopped")
		bundle := r.cfg.bundle(p.ID, c.ID)
		config, err := readConfig(bundle)
		if err != nil {
			t.Fatal(err)
		}
		// The hook reads its input, because crun dies of SIGPIPE if the hook ends first.
		hook := func(marker string) []specs.Hook {
			return []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "cat >" + marker}}}
		}
		config.Hooks = &specs.Hooks{Poststart: hook(started), Poststop: hook(stopped)}
		if err := ledger.WriteJSON(configFile(bundle), config); err != nil {
			t.Fatal(err)
		}
		c.start()
		if !ledger.Exists(started) || ledger.Exists(stopped) {
			t.Errorf("after the start: got hooks run %v and %v, want the first", ledger.Exists(started), ledger.Exists(stopped))
		}
		c.stop(0)
		if err := r.RemoveContainer(t.Context(), p.Pod, c.Container); err != nil || !ledger.Exists(stopped) {
			t.Errorf("after the removal: got hook run %v, error %v; want it run", ledger.Exists(stopped), err)
		}
	})
}
