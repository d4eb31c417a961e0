package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/test/fake"
	"github.com/tripod-run/tripod/test/races"
)

// crashDir names the directory in which a child process of TestN1 runs its script.
const crashDir = "TRIPOD_TEST_CRASH_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		if err := crashScript(context.Background(), dir); err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(races.Run(m.Run))
}

// crashScript takes a pod with many containers and a unit pod through every lifecycle call, and so past every fail
// point.
func crashScript(ctx context.Context, dir string) error {
	b, err := openConfig(dir, func(c *node.Config, _ map[string]*fake.Backend) { c.Hooks = &hooks{} })
	if err != nil {
		return err
	}
	defer b.close()
	for _, handler := range []string{"linux", "wasm"} {
		pod, err := b.RunSandbox(ctx, podConfig(handler), handler)
		if err != nil {
			return err
		}
		id, err := b.CreateContainer(ctx, pod, containerConfig("c"))
		if err != nil {
			return err
		}
		if same, err := b.CreateContainer(ctx, pod, containerConfig("c")); err != nil || same != id {
			return fmt.Errorf("the same request after an adjustment: got %s, error %w; want %s", same, err, id)
		}
		again := containerConfig("c")
		again.Metadata.Attempt = 1
		err = errors.Join(b.StartContainer(ctx, id), b.UpdateContainer(ctx, id, nil), b.UpdateSandbox(ctx, pod, nil, nil),
			b.StopContainer(ctx, id, 0))
		if id, createErr := b.CreateContainer(ctx, pod, again); createErr == nil { // for a unit pod, after the first attempt is retained
			err = errors.Join(err, b.StartContainer(ctx, id), b.StopContainer(ctx, id, 0), b.RemoveContainer(ctx, id))
		} else {
			err = errors.Join(err, createErr)
		}
		if handler == "linux" {
			id, createErr := b.CreateContainer(ctx, pod, componentConfig("component"))
			if err = errors.Join(err, createErr); createErr == nil {
				err = errors.Join(err, b.StartContainer(ctx, id), b.UpdateContainer(ctx, id, nil))
			}
		}
		if err := errors.Join(err, b.StopSandbox(ctx, pod), b.RemoveSandbox(ctx, pod)); err != nil {
			return err
		}
	}
	return nil
}

// TestN1KilledAtEveryFailPoint kills a node with SIGKILL at each fail point of the lifecycle, opens another on its
// state, and compares the record to reality. Then the pods can be removed, and the same script completes and leaves
// nothing behind.
func TestN1KilledAtEveryFailPoint(t *testing.T) {
	failpoint.Needed(t)
	visited := 0
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "node.") && !strings.HasPrefix(point, "fake.") {
			continue
		}
		visited++
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			child := exec.Command(os.Args[0])
			child.Env = append(os.Environ(), crashDir+"="+dir, failpoint.Variable+"="+point+"=kill")
			out, err := child.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the script was not killed at the fail point: %v\n%s", err, out)
			}
			b := open(t, dir)
			b.checkRecords(t)
			b = b.reopen(t) // the record must also be correct after recovery
			b.checkRecords(t)
			for _, p := range b.Pods() {
				must(t, b.RemoveSandbox(t.Context(), p.ID))
			}
			b.close()
			if err := crashScript(t.Context(), dir); err != nil {
				t.Errorf("the script after the crash: %v", err)
			}
			b = open(t, dir)
			if left := b.residue(t); len(left) > 0 || len(b.Pods()) > 0 {
				t.Errorf("got residue %v and pods %v, want none", left, b.Pods())
			}
		})
	}
	if visited < 30 {
		t.Errorf("got %d fail points, want at least 30", visited)
	}
}

// checkRecords compares the record to the state of the backends and the network.
func (b *bench) checkRecords(t *testing.T) {
	t.Helper()
	leases, err := b.network.Leases()
	must(t, err)
	var ready, known []string
	for _, p := range b.Pods() {
		known = append(known, p.ID)
		if p.Ready() {
			ready = append(ready, p.ID)
		}
		if p.Intent != "" || p.Resizing {
			t.Errorf("pod %s: got intent %q, resizing %v; want no order under way", p.ID, p.Intent, p.Resizing)
		}
		for _, c := range p.Visible() {
			if c.Request == nil || adjustedBy(c.Config) != "plugin" || c.Adjustment.GetAnnotations()["by"] != "plugin" {
				t.Errorf("container %s: got request %v and adjustment %v, want those of the plugin", c.ID, c.Request, c.Adjustment)
			}
			if c.State == node.Starting || c.Intent != "" {
				t.Errorf("container %s: got state %s and intent %q, want no order under way", c.ID, c.State, c.Intent)
			}
		}
	}
	slices.Sort(ready)
	if !slices.Equal(leases, ready) {
		t.Errorf("leases: got %v, want the ready pods %v", leases, ready)
	}
	for _, f := range b.backend {
		there, err := f.Pods()
		must(t, err)
		for _, id := range there {
			if !slices.Contains(known, id) {
				t.Errorf("the backend has pod %s without a record", id)
			}
		}
	}
}
