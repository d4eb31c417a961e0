package wasm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/test/workertest"
)

// pull stores an image of the component words, as a pull does.
func (r *rig) pull(words string) (imageID string) {
	r.Helper()
	r.eventually("the daemon knows the stored images", r.listed.Load)
	id := r.shelf.put(r.TB, words, "registry.example/demo/"+hashOf(words)[:8]+":1", nil)
	r.shelf.announce()
	return id
}

// compilation waits for the next event about a compilation.
func (r *rig) compilation() sandbox.Compilation {
	r.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case e := <-r.events:
			if e.Compilation != nil {
				return *e.Compilation
			}
		case <-timeout:
			r.Fatal("no event of a compilation within 20s")
		}
	}
}

// wantCompilation waits for the next event about a compilation and checks it.
func (r *rig) wantCompilation(imageID string, want sandbox.CompilationState) sandbox.Compilation {
	r.Helper()
	c := r.compilation()
	if c.ImageID != imageID || c.State != want {
		r.Fatalf("event = %+v, want %s of image %s", c, want, imageID)
	}
	return c
}

// compiled waits until a pulled image's component is compiled.
func (r *rig) compiled(imageID string) {
	r.Helper()
	r.wantCompilation(imageID, sandbox.CompilationRunning)
	r.wantCompilation(imageID, sandbox.CompilationDone)
}

func (r *rig) timesOpened() int {
	r.shelf.mu.Lock()
	defer r.shelf.mu.Unlock()
	return r.shelf.opened
}

// TestCompiledAtPull checks that a pulled component is compiled once, and that pods do not compile it again.
func TestCompiledAtPull(t *testing.T) {
	r := newRig(t)
	id := r.pull("world=grpc pulled")
	r.compiled(id)
	if c, ok := r.Compilation(id); !ok || c.State != sandbox.CompilationDone || c.ImageID != id ||
		!strings.HasPrefix(c.Image, "registry.example/demo/") {
		t.Errorf("Compilation = %+v, %v; want compiled", c, ok)
	}
	other := r.shelf.put(t, "world=grpc pulled", "registry.example/demo/same:2", nil)
	r.shelf.announce()
	r.wantCompilation(other, sandbox.CompilationDone)
	opened := r.timesOpened()
	r.run("p", "world=grpc pulled")
	if now := r.timesOpened(); now != opened+1 { // for the descriptors
		t.Errorf("the pod opened the binary %d times, want once", now-opened)
	}
	if _, ok := r.Compilation(hashOf("nothing")); ok {
		t.Error("an unknown image has a compilation")
	}
}

// TestPodJoinsCompilationOfPull checks that a pod waits for the compilation that its image's pull has begun.
func TestPodJoinsCompilationOfPull(t *testing.T) {
	r := newRig(t)
	id := r.pull("pause=500ms joined")
	r.wantCompilation(id, sandbox.CompilationRunning)
	r.run("p", "pause=500ms joined")
	r.wantCompilation(id, sandbox.CompilationDone)
	if opened := r.timesOpened(); opened != 2 {
		t.Errorf("the binary was opened %d times, want once to compile it and once for the descriptors", opened)
	}
}

// TestUpgradedEngineCompilesAgain checks that a daemon with another engine compiles all stored components, those of
// pods first, and that the same engine compiles nothing.
func TestUpgradedEngineCompilesAgain(t *testing.T) {
	own := filepath.Join(filepath.Dir(workertest.Program), "precompile")
	require.NoError(t, errors.Join(os.MkdirAll(own, 0o755), workertest.Install(filepath.Join(own, ProgramName), "1")))
	r := newRig(t, func(c *Config) { c.Program, c.CompileParallel = filepath.Join(own, ProgramName), 1 })
	var ids []string
	for _, words := range []string{"one", "two", "three", "four"} {
		id := r.pull("world=grpc " + words)
		r.compiled(id)
		ids = append(ids, id)
	}
	p := r.pod("p")
	c := r.container(p, "world=grpc four") // the same component as the last image
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	r.shelf.announce()
	r.wantCompilation(c.ImageID, sandbox.CompilationDone)
	opened := r.timesOpened()
	r.restartDaemon()
	r.eventually("the stored images are known", func() bool { _, ok := r.Compilation(ids[0]); return ok })
	if now := r.timesOpened(); now != opened {
		t.Errorf("the same engine opened %d binaries, want none", now-opened)
	}
	r.must(workertest.Install(r.config.Program, "2"))
	r.restartDaemon()
	first := r.compilation()
	if first.State != sandbox.CompilationRunning || first.ImageID != c.ImageID && first.ImageID != ids[3] {
		t.Errorf("first event = %+v, want the compilation of the pod's component", first)
	}
	r.eventually("all components are compiled", func() bool {
		return !slices.ContainsFunc(ids, func(id string) bool {
			c, _ := r.Compilation(id)
			return c.State != sandbox.CompilationDone
		})
	})
}

// TestRefusedComponentIsNotCompiledAgain checks that a pod gets the error of the compilation at the pull.
func TestRefusedComponentIsNotCompiledAgain(t *testing.T) {
	r := newRig(t)
	id := r.pull("invalid")
	r.wantCompilation(id, sandbox.CompilationRunning)
	failed := r.wantCompilation(id, sandbox.CompilationFailed)
	const says = `unknown import "example:none/thing"`
	if !strings.Contains(failed.Reason, says) {
		t.Errorf("reason = %q, want %q in it", failed.Reason, says)
	}
	p := r.pod("p")
	c := r.container(p, "invalid")
	create := func() int {
		before := r.timesOpened()
		_, err := r.CreateContainer(r.ctx(), p, c)
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), says) {
			t.Errorf("CreateContainer = %v, want ErrInvalidArgument with %q", err, says)
		}
		return r.timesOpened() - before
	}
	create() // opens the binary for its descriptors
	if opened := create(); opened != 0 {
		t.Errorf("the binary was opened %d times, want never", opened)
	}
	if state, _ := r.Compilation(id); state.State != sandbox.CompilationFailed || !strings.Contains(state.Reason, says) {
		t.Errorf("Compilation = %+v, want failed with %q", state, says)
	}
}

// TestCrashedCompilerIsTriedAgain checks that a failure that says nothing about the component is not remembered.
func TestCrashedCompilerIsTriedAgain(t *testing.T) {
	r := newRig(t)
	id := r.pull("crash")
	r.wantCompilation(id, sandbox.CompilationRunning)
	r.wantCompilation(id, sandbox.CompilationFailed)
	p := r.pod("p")
	if _, err := r.CreateContainer(r.ctx(), p, r.container(p, "crash")); err == nil {
		t.Error("CreateContainer = nil, want the compiler's crash")
	}
	r.wantCompilation(id, sandbox.CompilationRunning)
}

// TestRemovedImageEndsCompilation checks that removing an image cancels its compilation, ends the compiler, and deletes
// its code.
func TestRemovedImageEndsCompilation(t *testing.T) {
	r := newRig(t)
	done := r.pull("world=grpc done")
	r.compiled(done)
	id := r.pull("slow")
	r.wantCompilation(id, sandbox.CompilationRunning)
	r.eventually("the compiler runs", func() bool { return len(workertest.CompilerPids(r.config.Program)) == 1 })
	r.shelf.remove(done)
	r.shelf.remove(id)
	r.shelf.announce()
	r.eventually("the compiler has ended", func() bool { return len(workertest.CompilerPids(r.config.Program)) == 0 })
	r.eventually("the code is deleted", func() bool {
		entries, err := os.ReadDir(r.config.cacheDir())
		return err == nil && len(entries) == 0
	})
	if c, ok := r.Compilation(id); ok {
		t.Errorf("Compilation of a removed image = %+v", c)
	}
}

// TestStoppedDaemonEndsCompilation checks that Close ends compilers, and that the next daemon compiles what is missing.
func TestStoppedDaemonEndsCompilation(t *testing.T) {
	r := newRig(t)
	id := r.pull("slow")
	r.wantCompilation(id, sandbox.CompilationRunning)
	r.must(r.Close())
	if pids := workertest.CompilerPids(r.config.Program); len(pids) > 0 {
		t.Errorf("compilers %v are running after Close", pids)
	}
	r.open()
	r.eventually("the compilation begins again", func() bool {
		c, _ := r.Compilation(id)
		return c.State == sandbox.CompilationRunning
	})
}

// TestCompilersAreNice checks that a compiler yields to pods until one waits for it, in all of its threads.
func TestCompilersAreNice(t *testing.T) {
	r := newRig(t)
	id := r.pull("slow")
	r.wantCompilation(id, sandbox.CompilationRunning)
	r.eventually("the compiler is nice", func() bool { return slices.Equal(workertest.NicenessOf(r.config.Program), []int{15}) })
	p := r.pod("p")
	c := r.container(p, "slow")
	ctx, cancel := context.WithCancel(r.ctx())
	created := make(chan error, 1)
	go func() {
		_, err := r.CreateContainer(ctx, p, c)
		created <- err
	}()
	r.eventually("the compiler is not nice while a pod waits",
		func() bool { return slices.Equal(workertest.NicenessOf(r.config.Program), []int{0}) })
	cancel()
	if err := <-created; !errors.Is(err, context.Canceled) {
		t.Errorf("CreateContainer = %v, want Canceled", err)
	}
}
