package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/stats"
)

// saysStats returns a guest that answers each question about statistics with those of the container; nil is no answer.
func saysStats(says map[string]*runtimeapi.ContainerStats) *fakeGuest {
	return &fakeGuest{answer: func(_ context.Context, r guestapi.Request, _, out io.ReadWriter) error {
		s := says[r.Container]
		if s == nil {
			return errdefs.ErrUnavailable
		}
		return json.NewEncoder(out).Encode(s)
	}}
}

// fill makes the pod's scratch disk take so many bytes.
func (r *rig) fill(t *testing.T, size int) {
	t.Helper()
	file := r.cfg.ScratchFile("p", "scratch0")
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(2 * int64(size)); err != nil { // sparse
		t.Fatal(err)
	}
}

func (r *rig) stats(t *testing.T, c *sandbox.Container) *runtimeapi.ContainerStats {
	t.Helper()
	s, err := r.ContainerStats(t.Context(), r.pod, c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func number(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }

// TestStatsAreTheNodes: an honest guest's figures are reported, with the time and the file system of the node. A kubelet
// that cannot find the file system reports no figures of any pod.
func TestStatsAreTheNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const past = 17
		r := newRig(t, saysStats(map[string]*runtimeapi.ContainerStats{"c": {
			Attributes: &runtimeapi.ContainerAttributes{Id: "another"},
			Cpu:        &runtimeapi.CpuUsage{Timestamp: past, UsageCoreNanoSeconds: number(5e9)},
			Memory: &runtimeapi.MemoryUsage{Timestamp: past, WorkingSetBytes: number(3 << 20), UsageBytes: number(4 << 20),
				RssBytes: number(1 << 20), PageFaults: number(9)},
			Io: &runtimeapi.IoUsage{Timestamp: past, Psi: &runtimeapi.PsiStats{Some: &runtimeapi.PsiData{Total: 7, Avg10: 1.5}}},
			WritableLayer: &runtimeapi.FilesystemUsage{
				Timestamp: past, FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: "/scratch/containers"}, UsedBytes: number(2 << 20),
				InodesUsed: number(4),
			},
		}}))
		time.Sleep(time.Minute) // pacing: the machine runs, by the clock of the bubble
		r.fill(t, 1<<20)
		s, now := r.stats(t, r.container), time.Now().UnixNano()
		layer := s.GetWritableLayer()
		if info, err := os.Stat(layer.GetFsId().GetMountpoint()); err != nil || !info.IsDir() {
			t.Errorf("file system of the writable layer: got %q, error %v; want a directory of the node", layer.GetFsId().GetMountpoint(), err)
		}
		for name, at := range map[string]int64{"cpu": s.Cpu.GetTimestamp(), "memory": s.Memory.GetTimestamp(), "io": s.Io.GetTimestamp(),
			"writable layer": layer.GetTimestamp()} {
			if at != now {
				t.Errorf("time of %s: got %d, want the node's, %d", name, at, now)
			}
		}
		if s.Attributes != nil || s.Swap != nil {
			t.Errorf("got attributes %v and swap %v, want none", s.Attributes, s.Swap)
		}
		if s.Cpu.UsageCoreNanoSeconds.Value != 5e9 || s.Memory.WorkingSetBytes.Value != 3<<20 || s.Memory.UsageBytes.Value != 4<<20 ||
			s.Memory.RssBytes.Value != 1<<20 || s.Memory.PageFaults.Value != 9 || s.Io.Psi.Some.Total != 7 || s.Io.Psi.Some.Avg10 != 1.5 ||
			layer.UsedBytes.Value != 2<<20 {
			t.Errorf("statistics: got %v, want the guest's numbers", s)
		}
	})
}

// TestStatsOfHostileGuest: numbers that cannot be true are replaced by the nearest that can.
func TestStatsOfHostileGuest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		huge, psi := number(math.MaxUint64),
			&runtimeapi.PsiStats{Full: &runtimeapi.PsiData{Total: math.MaxUint64, Avg10: 1e300, Avg60: -5, Avg300: 101}}
		r := newRig(t, saysStats(map[string]*runtimeapi.ContainerStats{"c": {
			Cpu: &runtimeapi.CpuUsage{Timestamp: math.MaxInt64, UsageCoreNanoSeconds: huge, UsageNanoCores: huge, Psi: psi},
			Memory: &runtimeapi.MemoryUsage{WorkingSetBytes: huge, AvailableBytes: huge, UsageBytes: huge, RssBytes: huge, PageFaults: huge,
				MajorPageFaults: huge, Psi: psi},
			Swap:          &runtimeapi.SwapUsage{SwapAvailableBytes: huge, SwapUsageBytes: huge},
			Io:            &runtimeapi.IoUsage{Psi: psi},
			WritableLayer: &runtimeapi.FilesystemUsage{UsedBytes: huge, InodesUsed: huge},
		}}))
		r.fill(t, 1<<20)
		const memory, minute uint64 = 256<<20 + resources.GuestOverhead, uint64(time.Minute)
		var s *runtimeapi.ContainerStats
		for range 2 { // the second time, there is a rate
			time.Sleep(time.Minute) // pacing: the machine runs, by the clock of the bubble
			s = r.stats(t, r.container)
		}
		for name, c := range map[string]struct{ got, most uint64 }{
			"CPU":               {s.Cpu.UsageCoreNanoSeconds.Value, 2 * 2 * minute}, // two CPUs for two minutes
			"CPU rate":          {s.Cpu.UsageNanoCores.Value, 2e9},
			"CPU pressure":      {s.Cpu.Psi.Full.Total, 2 * minute},
			"working set":       {s.Memory.WorkingSetBytes.Value, memory},
			"memory":            {s.Memory.UsageBytes.Value, memory},
			"available memory":  {s.Memory.AvailableBytes.Value, memory},
			"RSS":               {s.Memory.RssBytes.Value, memory},
			"page faults":       {s.Memory.PageFaults.Value, mostCount},
			"major page faults": {s.Memory.MajorPageFaults.Value, mostCount},
			"memory pressure":   {s.Memory.Psi.Full.Total, 2 * minute},
			"swap":              {s.Swap.SwapUsageBytes.Value, memory},
			"available swap":    {s.Swap.SwapAvailableBytes.Value, memory},
			"I/O pressure":      {s.Io.Psi.Full.Total, 2 * minute},
			"writable layer":    {s.WritableLayer.UsedBytes.Value, scratchSize},
			"inodes":            {s.WritableLayer.InodesUsed.Value, 1},
		} {
			if c.got > c.most {
				t.Errorf("%s: got %d, want at most %d", name, c.got, c.most)
			}
		}
		if full := s.Io.Psi.Full; full.Avg10 != 100 || full.Avg60 != 0 || full.Avg300 != 100 {
			t.Errorf("averages of the pressure: got %v, want percents", full)
		}
		if s.Cpu.Timestamp != time.Now().UnixNano() {
			t.Errorf("time: got %d, want the node's", s.Cpu.Timestamp)
		}
	})
}

// TestStatsCoverTheScratchDisk: what the pod's scratch disk takes beyond what the guest says is the first running container's,
// whether the guest lies or does not answer.
func TestStatsCoverTheScratchDisk(t *testing.T) {
	const more = 8 << 20
	layerOf := func(size uint64) *runtimeapi.ContainerStats {
		return &runtimeapi.ContainerStats{WritableLayer: &runtimeapi.FilesystemUsage{UsedBytes: number(size)}}
	}
	for name, c := range map[string]struct {
		says map[string]*runtimeapi.ContainerStats
		want map[string]uint64
	}{
		"says nothing":    {map[string]*runtimeapi.ContainerStats{"c": layerOf(0), "d": {}}, map[string]uint64{"c": more, "d": 0}},
		"does not answer": {nil, map[string]uint64{"c": more, "d": 0}},
		"says too little": {map[string]*runtimeapi.ContainerStats{"c": layerOf(1 << 20), "d": layerOf(2 << 20)},
			map[string]uint64{"c": more - 2<<20, "d": 2 << 20}},
		"says enough": {map[string]*runtimeapi.ContainerStats{"c": layerOf(more), "d": layerOf(1)}, map[string]uint64{"c": more, "d": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, saysStats(c.says))
			d := &sandbox.Container{ID: "d", Config: r.container.Config}
			if err := r.ledger.Create("p", "d", state{Record: ledger.Record{ID: "d", Phase: ledger.Created}}); err != nil {
				t.Fatal(err)
			}
			r.ledger.Loaded("d").Adopt(r.newLife(r.pod, d, false))
			r.fill(t, scratchOwn+more)
			for _, container := range []*sandbox.Container{r.container, d} { // nothing is known of d yet; then the guest can trim
				if got := r.stats(t, container).GetWritableLayer().GetUsedBytes().GetValue(); got > more {
					t.Errorf("layer of %s before the guest could trim its disk: got %d bytes", container.ID, got)
				}
			}
			r.stats(t, r.container)
			for _, container := range []*sandbox.Container{d, r.container} {
				got, want := r.stats(t, container).GetWritableLayer().GetUsedBytes().GetValue(), c.want[container.ID]
				if got < want || got > want+64<<10 { // the node's file system takes some room for the file
					t.Errorf("layer of %s: got %d bytes, want %d", container.ID, got, want)
				}
			}
		})
	}
}

// TestSamplesOfGuest: of a guest's samples, those are reported that can be true, and none about the node's file systems.
func TestSamplesOfGuest(t *testing.T) {
	sample := func(family string, value float64, labels ...string) guestapi.Sample {
		return guestapi.Sample{Family: family, Value: value, Labels: labels}
	}
	got := guestSamples([]guestapi.Sample{
		sample("container_cpu_usage_seconds_total", 1.5, "total"),
		sample("container_cpu_usage_seconds_total", 2, "total"), // a kubelet reports nothing of the node if a sample is there twice
		sample("container_memory_usage_bytes", -1),
		sample("container_memory_rss", 1e300),
		sample("container_memory_swap", 1, "one label too many"),
		sample("container_cpu_usage_seconds_total", 1, "\xff"),
		sample("container_cpu_usage_seconds_total", 1, strings.Repeat("x", 1000)),
		sample("container_fs_usage_bytes", 1, "/dev/vda"),
		sample("of_my_own", 1),
	})
	want := stats.Samples{{Family: stats.CPUUsage, Value: 1.5, Labels: []string{"total"}}, {Family: stats.MemoryUsage},
		{Family: stats.MemoryRSS, Value: 1 << 53}}
	same := func(a, b stats.Sample) bool {
		return a.Family == b.Family && a.Value == b.Value && slices.Equal(a.Labels, b.Labels)
	}
	if !slices.EqualFunc(got, want, same) {
		t.Errorf("samples: got %v, want %v", got, want)
	}
	var many []guestapi.Sample
	for i := range 10_000 {
		many = append(many, sample("container_cpu_usage_seconds_total", 1, fmt.Sprint(i)))
	}
	if n := len(guestSamples(many)); n != 1000 {
		t.Errorf("samples of a guest with 10000: got %d, want 1000", n)
	}
}
