package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/cli/bench"
)

const (
	// turns is how often the component and the bare handler are each measured. The report contains the medians.
	turns = 7
	// Payloads in bytes: smallSize for calls per second, largeSize for throughput.
	smallSize, largeSize = 128, 1 << 20
	// smallConcurrency is below 64, a pod's default limit of concurrent calls. largeConcurrency keeps both sides busy.
	smallConcurrency, largeConcurrency = 32, 4
	// bystanderRate is the number of calls per second to the bystander. It is low enough to avoid queueing.
	bystanderRate = 200
)

// calls compares the component with the bare handler, using unary calls with payloads of two sizes. It also measures
// the latency of the component while the guest of another pod spins.
func (n *node) calls(ctx context.Context, duration time.Duration) (err error) {
	component, err := n.start(ctx, "component")
	defer func() { err = errors.Join(err, n.remove(ctx, component)) }()
	if err != nil {
		return err
	}
	stop, err := startEcho(ctx, filepath.Join(n.netns, component.id))
	if err != nil {
		return err
	}
	defer stop()
	own, bare := component.dial(), dial(fmt.Sprintf("%s:%d", component.ip, echoPort))
	defer own.close()
	defer bare.close()

	fmt.Println("| unary gRPC over HTTP/3 (median of", turns, "turns) | component | bare handler | component : bare |\n|---|---:|---:|---:|")
	mine, theirs, err := inTurns(ctx, own, bare, payload(smallSize), smallConcurrency, duration)
	if err != nil {
		return err
	}
	fmt.Printf("| %d bytes each way, %d at a time, calls/s | %.0f | %.0f | %.2f |\n", smallSize, smallConcurrency, mine, theirs, mine/theirs)
	if mine, theirs, err = inTurns(ctx, own, bare, payload(largeSize), largeConcurrency, duration); err != nil {
		return err
	}
	fmt.Printf("| 1 MiB each way, %d at a time, MB/s each way | %.0f | %.0f | %.2f |\n", largeConcurrency, megabytes(mine), megabytes(theirs),
		mine/theirs)
	cleartext := dialCleartext(component.ip + ":80")
	defer cleartext.close()
	if mine, err = rate(ctx, cleartext, payload(largeSize), largeConcurrency, 2*duration); err != nil {
		return err
	}
	fmt.Printf("| the same over HTTP/2 without TLS, MB/s each way | %.0f | | |\n", megabytes(mine))
	return n.beside(ctx, own, duration)
}

// megabytes converts calls per second with large payloads to megabytes per second.
func megabytes(calls float64) float64 { return calls * largeSize / 1e6 }

// inTurns measures the rates of two connections alternately, and returns the median for each.
func inTurns(ctx context.Context, own, bare *conn, frame []byte, concurrency int,
	duration time.Duration) (mine, theirs float64, err error) {
	return medians(own, bare, func(c *conn) (float64, error) { return rate(ctx, c, frame, concurrency, duration) })
}

// medians measures two servers alternately, and returns the median for each.
func medians[T any](own, bare T, measure func(T) (float64, error)) (mine, theirs float64, err error) {
	values := [2][]float64{}
	for turn := range turns + 1 {
		for i, server := range []T{own, bare} {
			v, err := measure(server)
			if err != nil {
				return 0, 0, err
			}
			if turn > 0 { // the first turn is a warm-up
				values[i] = append(values[i], v)
			}
		}
	}
	return median(values[0]), median(values[1]), nil
}

// beside measures a bystander's latency under two conditions, in turns: alone, and while the guest of another pod
// computes without end.
func (n *node) beside(ctx context.Context, bystander *conn, duration time.Duration) (err error) {
	spinner, err := n.start(ctx, "spinner")
	defer func() { err = errors.Join(err, n.remove(ctx, spinner)) }()
	if err != nil {
		return err
	}
	quiet, disturbed := []float64{}, []float64{}
	medians := [2][]float64{}
	for range turns {
		p50, p99, err := tail(ctx, bystander, duration)
		if err != nil {
			return err
		}
		quiet, medians[0] = append(quiet, p99), append(medians[0], p50)
		if p50, p99, err = n.tailBesideSpinner(ctx, bystander, spinner, duration); err != nil {
			return err
		}
		disturbed, medians[1] = append(disturbed, p99), append(medians[1], p50)
	}
	fmt.Printf("\n| a pod asked %d times a second | alone | beside a guest that spins | beside : alone |\n|---|---:|---:|---:|\n",
		bystanderRate)
	fmt.Printf("| p50 in ms | %.2f | %.2f | %.2f |\n", median(medians[0]), median(medians[1]), median(medians[1])/median(medians[0]))
	fmt.Printf("| p99 in ms | %.2f | %.2f | %.2f |\n", median(quiet), median(disturbed), median(disturbed)/median(quiet))
	return nil
}

func tail(ctx context.Context, c *conn, duration time.Duration) (p50, p99 float64, err error) {
	took, err := latencies(ctx, c, payload(smallSize), bystanderRate, duration)
	if err != nil {
		return 0, 0, err
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return ms(quantile(took, 0.5)), ms(quantile(took, 0.99)), nil
}

// tailBesideSpinner calls tail while a call to Spin is running.
func (n *node) tailBesideSpinner(ctx context.Context, c *conn, spinner *pod, duration time.Duration) (p50, p99 float64, err error) {
	spinning, cancel := context.WithTimeout(ctx, duration+time.Minute)
	defer cancel()
	other := spinner.dial()
	defer other.close()
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = other.call(spinning, spinProcedure, spin()) }) // ends when its context is cancelled
	defer wg.Wait()
	defer cancel()
	if err := n.awaitSpin(ctx, spinner); err != nil {
		return 0, 0, err
	}
	return tail(ctx, c, duration)
}

// awaitSpin waits until the pod has used more processor time than an idle guest would.
func (n *node) awaitSpin(ctx context.Context, spinner *pod) error {
	used := func() (uint64, error) {
		stats, err := n.client.ContainerStats(ctx, spinner.container)
		return stats.GetCpu().GetUsageCoreNanoSeconds().GetValue(), err
	}
	before, err := used()
	for deadline := time.Now().Add(10 * time.Second); err == nil && time.Now().Before(deadline); {
		var now uint64
		if now, err = used(); err == nil && now-before > uint64(100*time.Millisecond) {
			return nil
		}
		time.Sleep(20 * time.Millisecond) // pacing of the poll
	}
	if err == nil {
		err = errors.New("the spinner does not spin")
	}
	return err
}

// many runs the measurement with the given number of pods. It starts the pods, calls each pod until it answers, and
// removes the pods. The memory is that of the daemon, the workers and their code.
func (n *node) many(ctx context.Context, count int) (err error) {
	before, err := bench.DaemonsPSS("/proc")
	if err != nil {
		return err
	}
	pods := make([]*pod, count)
	defer func() { err = errors.Join(err, n.remove(ctx, pods...)) }()
	failures, retries := make([]error, count), make([]int, count)
	started := time.Now()
	each(10, count, func(i int) {
		pods[i], failures[i] = n.start(ctx, fmt.Sprintf("many-%d", i))
	})
	up := time.Since(started)
	if err := errors.Join(failures...); err != nil {
		return err
	}
	frame, call := payload(smallSize), (*conn).echo
	if strings.Contains(n.image, "/greeter-") {
		frame, call = greeting(), (*conn).hello
	}
	asking := time.Now()
	each(10, count, func(i int) {
		retries[i], failures[i] = pods[i].untilAnswered(ctx, func(c *conn) error { return call(c, ctx, frame) })
	})
	if err := errors.Join(failures...); err != nil {
		return err
	}
	repeated := count - len(slices.DeleteFunc(retries, func(n int) bool { return n > 0 }))
	answered := time.Since(asking)
	after, err := bench.DaemonsPSS("/proc")
	if err != nil {
		return err
	}
	fmt.Printf("%d pods on one node, 10 at a time: all running after %.1f s (%.0f pods/s); each has answered over HTTP/3, on a connection of its own, after %.1f s more, %d of them not at the first attempt. Daemon and worker have then grown by %.2f MiB for each pod.\n",
		count, up.Seconds(), float64(count)/up.Seconds(), answered.Seconds(), repeated, float64(after-before)/(1<<20)/float64(count))
	_, err = fmt.Fprintln(os.Stderr, "wasmbench:", count, "pods have answered")
	return err
}

// patience is how long to wait for a pod's answer.
const patience = 90 * time.Second

// untilAnswered calls the pod until it answers, each time on a new connection, and returns the number of failed attempts.
func (p *pod) untilAnswered(ctx context.Context, call func(c *conn) error) (failed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for ; ; failed++ {
		c := p.dial()
		err = call(c)
		c.close()
		if err == nil {
			return failed, nil
		}
		if ctx.Err() != nil {
			return failed, fmt.Errorf("pod at %s: %w", p.ip, err)
		}
		time.Sleep(time.Second) // pacing
	}
}
