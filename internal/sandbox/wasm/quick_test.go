package wasm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
)

// quickRig is a rig whose components all begin with quick code. The optimising compiler of the returned words waits until the
// returned function is called.
func quickRig(t *testing.T) (r *rig, words string, optimise func()) {
	t.Helper()
	r = newRig(t, func(c *Config) { c.QuickCode, c.quickAbove = true, 1 })
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} { // the compiler runs as another user
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "go")
	return r, "world=grpc optimise=" + path, func() {
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// quick reports whether the worker of a container runs quick code, as the worker and as the daemon say.
func (r *rig) quick(c *sandbox.Container) (worker, daemon bool) {
	r.Helper()
	h, err := r.ledger.Find(c.ID, c.ID)
	r.must(err)
	_, l := h.Snapshot()
	in, err := r.inventory(r.ctx())
	r.must(err)
	return in[l.worker][c.ID].Quick, l.quick.Load()
}

func (r *rig) wantOptimised(c *sandbox.Container) {
	r.Helper()
	r.eventually("the worker runs optimised code", func() bool {
		worker, daemon := r.quick(c)
		return !worker && !daemon
	})
}

// TestQuickCodeFirst: a pod starts while its component is still being optimised, another one with the same component, too. Both
// get the optimised code without a restart, and so does the next pod.
func TestQuickCodeFirst(t *testing.T) {
	r, words, optimise := quickRig(t)
	_, one := r.run("one", words)
	_, two := r.run("two", words)
	for _, c := range []*sandbox.Container{one, two} {
		if worker, daemon := r.quick(c); !worker || !daemon {
			t.Errorf("quick code: got %t by the worker and %t by the daemon, want it in both", worker, daemon)
		}
	}
	optimise()
	r.wantOptimised(one)
	r.wantOptimised(two)
	p, three := r.run("three", words)
	if worker, daemon := r.quick(three); worker || daemon {
		t.Error("a pod began with quick code although there is optimised code")
	}
	r.wantState(p, three, sandbox.StateRunning)
}

// TestQuickCodeNotWanted: a pod whose annotation demands optimised code waits for it, also beside one that runs quick code.
func TestQuickCodeNotWanted(t *testing.T) {
	r, words, optimise := quickRig(t)
	_, one := r.run("one", words)
	started := make(chan *sandbox.Container)
	go func() {
		p := r.pod("two", func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations[r.cfg.LabelPrefix+annotations.KeyCode] = string(code.ModeOptimised)
		})
		c := r.create(p, words)
		r.must(r.StartContainer(r.ctx(), p, c))
		started <- c
	}()
	if worker, _ := r.quick(one); !worker {
		t.Error("the first pod does not run quick code")
	}
	optimise()
	two := <-started
	if worker, daemon := r.quick(two); worker || daemon {
		t.Error("a pod that demands optimised code runs quick code")
	}
	r.wantOptimised(one)
}

// TestQuickCodeLetsDaemonEnd: a daemon that ends does not wait for optimised code that only improves pods.
func TestQuickCodeLetsDaemonEnd(t *testing.T) {
	r, words, optimise := quickRig(t)
	_, c := r.run("one", words)
	r.killDaemon()
	ended := make(chan struct{})
	go func() { r.cache.Wait(); close(ended) }()
	r.eventually("the compilation ends", func() bool { return guard.IsClosed(ended) })
	r.open()
	optimise()
	r.shelf.announce()
	r.wantOptimised(c)
}

// TestQuickCodeSurvivesDaemon: a daemon that finds a pod with quick code makes the optimised code, or takes what there is.
func TestQuickCodeSurvivesDaemon(t *testing.T) {
	r, words, optimise := quickRig(t)
	_, c := r.run("one", words)
	r.restartDaemon()
	if worker, daemon := r.quick(c); !worker || !daemon {
		t.Errorf("quick code after a restart of the daemon: got %t by the worker and %t by the daemon", worker, daemon)
	}
	optimise()
	r.shelf.announce()
	r.wantOptimised(c)
}

// TestQuickCodeRefused: a component that only the optimising compiler accepts waits for that, and nothing is remembered against it.
func TestQuickCodeRefused(t *testing.T) {
	r, words, optimise := quickRig(t)
	optimise()
	p, c := r.run("one", "world=grpc slowly "+words)
	if worker, daemon := r.quick(c); worker || daemon {
		t.Error("the pod runs code that the quick compiler has refused")
	}
	r.wantState(p, c, sandbox.StateRunning)
}

// TestQuickCodeOfCommands: a command waits for optimised code unless its pod wants it otherwise, also beside such a pod.
func TestQuickCodeOfCommands(t *testing.T) {
	for _, c := range []struct {
		mode  code.Mode
		world wit.World
		waits bool
	}{
		{code.ModeAuto, wit.WorldGRPC, false}, {code.ModeAuto, wit.WorldHTTP, false}, {code.ModeAuto, wit.WorldCommand, true},
		{code.ModeAuto, "", false},
		{code.ModeQuick, wit.WorldCommand, false}, {code.ModeOptimised, wit.WorldGRPC, true},
	} {
		if got := c.mode.Waits(c.world); got != c.waits {
			t.Errorf("a %q component with code %q waits for optimised code: got %t, want %t", c.world, c.mode, got, c.waits)
		}
	}
	r, words, optimise := quickRig(t)
	words = strings.Replace(words, "grpc", "command", 1)
	p := r.pod("quick", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations[r.cfg.LabelPrefix+annotations.KeyCode] = string(code.ModeQuick)
	})
	c := r.create(p, words)
	r.must(r.StartContainer(r.ctx(), p, c))
	if worker, _ := r.quick(c); !worker {
		t.Error("a command that wants quick code does not run it")
	}
	optimise()
	r.wantOptimised(c)
}
