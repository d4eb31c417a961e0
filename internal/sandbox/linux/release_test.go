package linux

import (
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
)

// TestRelease: a container of crun is started without crun, and crun then takes it for running. Of a container whose
// init has ended, release says so.
func TestRelease(t *testing.T) {
	r := newRig(t, "crun")
	if !r.runtime.Releases {
		t.Fatal("the runtime cannot be released")
	}
	// Without the program, only a release can start a container.
	releaser := oci.Runtime{Path: "/nowhere/crun", StateDir: r.cfg.ociDir(), Tried: r.runtime.Tried}
	waits := func(id string) bool { return ledger.Exists(filepath.Join(r.cfg.ociDir(), id, "exec.fifo")) }
	p := r.pod()
	create := func() (id string, got oci.Processes) {
		t.Helper()
		c := p.container(forever)
		got = c.launch()
		t.Cleanup(func() {
			_ = got.Init.Signal(unix.SIGKILL)
			<-got.Conmon.Dead
			got.Init.Close()
		})
		return c.ID, got
	}

	id, _ := create()
	if r.runtime.Started(t.Context(), id) || !waits(id) {
		t.Fatal("the created container does not wait")
	}
	if err := releaser.Start(t.Context(), id, false); err != nil {
		t.Fatal(err)
	}
	if !r.runtime.Started(t.Context(), id) || waits(id) {
		t.Error("the released container is not running")
	}

	id, got := create()
	_ = got.Init.Signal(unix.SIGKILL)
	<-got.Init.Dead
	if err := releaser.Start(t.Context(), id, false); err == nil {
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
