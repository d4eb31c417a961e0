package linux

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
)

// BenchmarkStart measures each step of a container's life in milliseconds.
func BenchmarkStart(b *testing.B) {
	for _, name := range []string{"crun", "runc"} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, name)
			p := r.pod()
			took := map[string]time.Duration{}
			timed := func(order string, f func() error) {
				began := time.Now()
				if err := f(); err != nil {
					b.Fatal(err)
				}
				took[order] += time.Since(began)
			}
			ctx := context.Background()
			template := p.container("exec sleep 1000")
			for b.Loop() {
				c := &sandbox.Container{ID: newID(), Config: template.Config, ImageID: busybox}
				timed("create", func() error { _, err := r.CreateContainer(ctx, p.Pod, c); return err })
				timed("start", func() error { return r.StartContainer(ctx, p.Pod, c) })
				timed("exec", func() error {
					_, err := r.Exec(ctx, p.Pod, c, sandbox.ExecRequest{Cmd: []string{"/bin/true"}})
					return err
				})
				timed("stop", func() error { return r.StopContainer(ctx, p.Pod, c, 0) })
				timed("remove", func() error { return r.RemoveContainer(ctx, p.Pod, c) })
			}
			for order, d := range took {
				b.ReportMetric(float64(d.Microseconds())/1000/float64(b.N), order+"-ms")
			}
		})
	}
}

// BenchmarkSandbox measures a pod without containers, with a PID namespace per container.
func BenchmarkSandbox(b *testing.B) {
	r := newRig(b, "runc")
	p := r.pod()
	ctx := context.Background()
	var setup, remove time.Duration
	for b.Loop() {
		pod := &sandbox.Pod{ID: newID(), Config: p.Config, Netns: p.Netns}
		began := time.Now()
		if err := r.CreateSandbox(ctx, pod); err != nil {
			b.Fatal(err)
		}
		setup += time.Since(began)
		began = time.Now()
		if err := r.RemoveSandbox(ctx, pod); err != nil {
			b.Fatal(err)
		}
		remove += time.Since(began)
	}
	b.ReportMetric(float64(setup.Microseconds())/1000/float64(b.N), "create-ms")
	b.ReportMetric(float64(remove.Microseconds())/1000/float64(b.N), "remove-ms")
}

// BenchmarkRemoveBesideWriters measures the removal of a container while 100 MiB of another program's writes are not on
// disk yet, with and without syncs of the container's layer.
func BenchmarkRemoveBesideWriters(b *testing.B) {
	for name, volatile := range map[string]bool{"volatile": true, "synced": false} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, "crun")
			r.volatile = volatile
			p := r.pod()
			template := p.container("exec sleep 1000")
			var took []time.Duration
			for b.Loop() {
				c := &sandbox.Container{ID: newID(), Config: template.Config, ImageID: busybox}
				if _, err := r.CreateContainer(b.Context(), p.Pod, c); err != nil {
					b.Fatal(err)
				}
				neighbour := filepath.Join(filepath.Dir(r.images.dir), c.ID) // a new file, because ext4 flushes a file that replaces another
				if err := os.WriteFile(neighbour, make([]byte, 100<<20), 0o600); err != nil {
					b.Fatal(err)
				}
				began := time.Now()
				if err := r.RemoveContainer(b.Context(), p.Pod, c); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(began))
				if err := os.Remove(neighbour); err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
		})
	}
}

// BenchmarkStats measures ContainerStats of a running container.
func BenchmarkStats(b *testing.B) {
	r := newRig(b, "runc")
	p := r.pod()
	c := p.container("exec sleep 1000").start()
	for b.Loop() {
		if _, err := r.ContainerStats(context.Background(), p.Pod, c.Container); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkIdleMemory measures our memory for an idle container: conmon's proportional share.
func BenchmarkIdleMemory(b *testing.B) {
	const containers = 20
	r := newRig(b, "crun")
	p := r.pod()
	for range containers {
		p.container("exec sleep 1000").start()
	}
	for b.Loop() {
		var pss, rss float64
		for _, m := range oci.Monitors(r.cfg.Root) {
			pss, rss = pss+rollup(b, m.Pid, "Pss:"), rss+rollup(b, m.Pid, "Rss:")
		}
		b.ReportMetric(pss/containers, "pss-KiB")
		b.ReportMetric(rss/containers, "rss-KiB")
	}
}

func rollup(b *testing.B, pid int, field string) (kib float64) {
	b.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if strings.HasPrefix(line, field) {
			_, _ = fmt.Sscan(strings.TrimPrefix(line, field), &kib)
		}
	}
	return kib
}
