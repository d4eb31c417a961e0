package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// peers compares the Greeters in the given images, each in a pod, with the given program, which is examples/wasm/greeter-go
// built for this machine, in the pod's network namespace. Neither has a limit of processor time. An image with the suffix
// ",reuse" runs with that annotation.
func (n *node) peers(ctx context.Context, program string, images []string, duration time.Duration) error {
	fmt.Printf("| Greeter, unary over HTTP/2 (median of %d turns) | calls/s, %d connections | grpc-go | ratio | p50 in µs, 1 connection | grpc-go | ratio | context switches for a call, %[2]d connections | grpc-go | machine idle | grpc-go |\n", turns, smallConcurrency)
	fmt.Println("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	for i, image := range images {
		ref, reuse := strings.CutSuffix(image, ",reuse")
		n.image, n.annotations = ref, nil
		if reuse {
			n.annotations = map[string]string{"vimana.host/reuse": "true"}
		}
		if err := errors.Join(n.ensureImage(ctx), n.peer(ctx, program, path.Base(image), fmt.Sprintf("peer-%d", i), duration)); err != nil {
			return fmt.Errorf("%s: %w", image, err)
		}
	}
	return nil
}

// peer measures one row of peers.
func (n *node) peer(ctx context.Context, program, title, name string, duration time.Duration) (err error) {
	guest, err := n.start(ctx, name)
	defer func() { err = errors.Join(err, n.remove(ctx, guest)) }()
	if err != nil {
		return err
	}
	server := exec.CommandContext(ctx, program) // it prints each call to its standard error
	server.Env = append(os.Environ(), fmt.Sprintf("TRIPODGRPC_ADDRESS=0.0.0.0:%d", echoPort))
	stop, err := startIn(filepath.Join(n.netns, guest.id), server)
	if err != nil {
		return err
	}
	defer stop()
	own, bare := dialMany(guest.ip+":80"), dialMany(fmt.Sprintf("%s:%d", guest.ip, echoPort))
	defer own.close()
	defer bare.close()
	frame := greeting()
	for _, c := range []*conn{own[0], bare[0]} {
		if err := c.awaitHello(ctx, frame); err != nil {
			return err
		}
	}
	var machine [2]kernelFigures // of own, bare
	mine, theirs, err := medians(own, bare, func(all conns) (float64, error) {
		before, err := readKernel()
		if err != nil {
			return 0, err
		}
		rate, err := rateOf(func(i int) error { return all[i].hello(ctx, frame) }, len(all), duration)
		after, statErr := readKernel()
		which := 0
		if &all[0] == &bare[0] {
			which = 1
		}
		machine[which].add(before, after, rate*duration.Seconds())
		return rate, errors.Join(err, statErr)
	})
	if err != nil {
		return err
	}
	took, native, err := medians(own[0], bare[0], func(c *conn) (float64, error) { return c.pace(ctx, frame, duration) })
	if err != nil {
		return err
	}
	fmt.Printf("| %s | %.0f | %.0f | %.2f | %.0f | %.0f | %.1f | %.1f | %.1f | %.0f %% | %.0f %% |\n", title, mine, theirs, mine/theirs, took,
		native, took/native,
		median(machine[0].switches), median(machine[1].switches), 100*median(machine[0].idle), 100*median(machine[1].idle))
	return nil
}

// kernelFigures are of the whole machine, the client included, one of each for a turn.
type kernelFigures struct {
	switches []float64 // context switches for a call
	idle     []float64 // share of the processors' time
}

func (k *kernelFigures) add(before, after procfs.Stat, calls float64) {
	was, is := before.CPUTotal, after.CPUTotal
	idle := is.Idle - was.Idle
	busy := is.User + is.System + is.Nice + is.IRQ + is.SoftIRQ +
		is.Steal - was.User - was.System - was.Nice - was.IRQ - was.SoftIRQ - was.Steal
	k.idle = append(k.idle, idle/(idle+busy))
	k.switches = append(k.switches, float64(after.ContextSwitches-before.ContextSwitches)/calls)
}

func readKernel() (procfs.Stat, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return procfs.Stat{}, err
	}
	return fs.Stat()
}

// conns are connections to one server.
type conns []*conn

// dialMany makes smallConcurrency connections by HTTP/2 without TLS.
func dialMany(addr string) conns {
	all := make(conns, smallConcurrency)
	for i := range all {
		all[i] = dialCleartext(addr)
	}
	return all
}

func (all conns) close() {
	for _, c := range all {
		c.close()
	}
}

// awaitHello calls SayHello until it is answered, for at most 10 seconds.
func (c *conn) awaitHello(ctx context.Context, frame []byte) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // pacing of a poll
		if err := c.hello(ctx, frame); err == nil || time.Now().After(end) {
			return err
		}
	}
}

// pace calls SayHello again and again, and returns the median of the times in microseconds.
func (c *conn) pace(ctx context.Context, frame []byte, duration time.Duration) (float64, error) {
	var took []time.Duration
	for started := time.Now(); time.Since(started) < duration; {
		began := time.Now()
		if err := c.hello(ctx, frame); err != nil {
			return 0, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return float64(quantile(took, 0.5).Nanoseconds()) / 1e3, nil
}
