package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/cli"
)

// Overhead is what a pod needs besides its containers: a pod's share of its helpers and of the daemons' growth. It is
// what `overhead.podFixed` of a RuntimeClass should cover.
type Overhead struct {
	Handler string `json:"handler"`
	Pods    int    `json:"pods"`
	// Memory is the PSS in bytes, without the memory of guests.
	Memory int64 `json:"memory_bytes_per_pod"`
	// MilliCPU is the CPU time while nothing happens, in thousandths of a CPU.
	MilliCPU float64 `json:"milli_cpu_per_pod"`
	// Helpers counts the helpers by name.
	Helpers map[string]int `json:"helpers"`
}

// MeasureOverhead runs a number of pods, after one to warm up, and measures them after and during the time idle.
func MeasureOverhead(ctx context.Context, client *cli.Client, o Options, pods int, idle time.Duration) (_ *Overhead, err error) {
	d := newDriver(client, o)
	if err := d.ensureImage(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.sweep(ctx)) }()
	discard := newRecorder()
	warm, err := d.startPod(ctx, discard)
	if err == nil {
		err = d.removePod(ctx, discard, warm)
	}
	if err != nil {
		return nil, err
	}
	without, err := d.observe(ctx, nil, idle)
	if err != nil {
		return nil, err
	}
	err = parallel(ctx, 4, pods, func(int) error { _, err := d.startPod(ctx, discard); return err })
	if err != nil {
		return nil, err
	}
	with, err := d.observe(ctx, without.processes, idle)
	if err != nil {
		return nil, err
	}
	return &Overhead{
		Handler: o.Handler, Pods: pods, Helpers: with.helpers,
		// A daemon whose heap has shrunk meanwhile does not make the helpers smaller.
		Memory:   (with.helperMemory + max(0, with.daemonMemory-without.daemonMemory)) / int64(pods),
		MilliCPU: max(0, with.milliCPU-without.milliCPU) / float64(pods),
	}, nil
}

// observation is what the daemons and the helpers use at one time.
type observation struct {
	processes                  map[process]string
	helpers                    map[string]int
	helperMemory, daemonMemory int64
	milliCPU                   float64
}

// observe waits for the time idle and measures the daemons and those processes that did not exist before. With a nil map,
// it measures only the daemons.
func (d *driver) observe(ctx context.Context, before map[process]string, idle time.Duration) (*observation, error) {
	now, err := processes("/proc")
	if err != nil {
		return nil, err
	}
	o := &observation{processes: now, helpers: map[string]int{}}
	var observedHelpers, observedDaemons []int
	for p, name := range now {
		_, old := before[p]
		daemon := slices.Contains(daemons, name) && p.pid != os.Getpid()
		if before != nil && !old && !daemon && (!inContainer("/proc", p.pid) || isPause(name)) && pss("/proc", p.pid) > 0 {
			o.helpers[name]++
			observedHelpers = append(observedHelpers, p.pid)
		}
		if daemon {
			observedDaemons = append(observedDaemons, p.pid)
		}
	}
	observed := slices.Concat(observedHelpers, observedDaemons)
	from := cpuTime("/proc", observed)
	select {
	case <-time.After(idle):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	o.milliCPU = 1000 * (cpuTime("/proc", observed) - from).Seconds() / idle.Seconds()
	for _, pid := range observedHelpers {
		o.helperMemory += pssWithout("/proc", pid, d.o.Memory)
	}
	for _, pid := range observedDaemons {
		o.daemonMemory += pssWithout("/proc", pid, 0)
	}
	return o, nil
}

// tick is the unit of CPU times in /proc (USER_HZ).
const tick = 10 * time.Millisecond

// cpuTime returns the total CPU time of the processes. Those that have ended count as nothing.
func cpuTime(proc string, pids []int) (total time.Duration) {
	for _, pid := range pids {
		stat, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 13 {
			continue
		}
		for _, field := range fields[11:13] { // utime and stime
			n, _ := strconv.ParseInt(field, 10, 64)
			total += time.Duration(n) * tick
		}
	}
	return total
}

// pssWithout returns the proportional set size of a process in bytes, without mappings of exactly this size: those are the
// memory of a guest. It returns 0 if the process has ended.
func pssWithout(proc string, pid int, guest int64) int64 {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "smaps"))
	if err != nil {
		return 0
	}
	defer f.Close()
	return sumMappings(f, guest)
}

func sumMappings(smaps io.Reader, guest int64) (total int64) {
	var size int64
	for lines := bufio.NewScanner(smaps); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[1], 10, 64)
		switch fields[0] {
		case "Size:":
			size = kib << 10
		case "Pss:":
			if guest == 0 || size != guest {
				total += kib << 10
			}
		}
	}
	return total
}

// Print writes the overhead as a RuntimeClass would have it.
func (o *Overhead) Print(out io.Writer) error {
	_, err := fmt.Fprintf(out, "handler %s, %d pods: memory %.2f MiB, CPU %.2f m per pod; helpers: %s\n",
		o.Handler, o.Pods, float64(o.Memory)/(1<<20), o.MilliCPU, counts(o.Helpers))
	return err
}
