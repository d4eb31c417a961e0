package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// serve compares pods of wasi:http components with the given program, the CLI of wasmtime, whose command serve serves the same
// component in the pod's network namespace. Each component is IMAGE=FILE. Neither side has a limit of processor time. The
// client is wrk.
func (n *node) serve(ctx context.Context, program string, components []string, duration time.Duration) error {
	fmt.Printf("| component, HTTP/1.1 (median of %d turns) | requests/s, %d connections | wasmtime serve | ratio | p99 in ms | wasmtime serve | ratio | requests/s, 1 connection | wasmtime serve | ratio |\n", turns, smallConcurrency)
	fmt.Println("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	for i, component := range components {
		image, file, ok := strings.Cut(component, "=")
		if !ok {
			return fmt.Errorf("%q is not IMAGE=FILE", component)
		}
		n.image = image
		if err := errors.Join(n.ensureImage(ctx), n.serveOne(ctx, program, file, fmt.Sprintf("serve-%d", i), duration)); err != nil {
			return fmt.Errorf("%s: %w", component, err)
		}
	}
	return nil
}

// serveOne measures one row of serve.
func (n *node) serveOne(ctx context.Context, program, file, name string, duration time.Duration) (err error) {
	guest, err := n.start(ctx, name)
	defer func() { err = errors.Join(err, n.remove(ctx, guest)) }()
	if err != nil {
		return err
	}
	// JavaScript needs cli
	server := exec.CommandContext(ctx, program, "serve", "-S", "cli", "--addr", fmt.Sprintf("0.0.0.0:%d", echoPort), file)
	server.Stderr = os.Stderr
	stop, err := startIn(filepath.Join(n.netns, guest.id), server)
	if err != nil {
		return err
	}
	defer stop()
	own, other := "http://"+guest.ip+"/", fmt.Sprintf("http://%s:%d/", guest.ip, echoPort)
	for _, url := range []string{own, other} {
		if err := awaitPage(ctx, url); err != nil {
			return err
		}
	}
	late := map[string][]float64{} // p99 in milliseconds of the turns, by URL
	mine, theirs, err := medians(own, other, func(url string) (float64, error) {
		rate, p99, err := wrk(ctx, url, smallConcurrency, duration)
		late[url] = append(late[url], p99)
		return rate, err
	})
	if err != nil {
		return err
	}
	single, theirSingle, err := medians(own, other, func(url string) (float64, error) {
		rate, _, err := wrk(ctx, url, 1, duration)
		return rate, err
	})
	if err != nil {
		return err
	}
	p99, theirP99 := median(late[own][1:]), median(late[other][1:]) // the first turn is a warm-up
	fmt.Printf("| %s | %.0f | %.0f | %.2f | %.1f | %.1f | %.2f | %.0f | %.0f | %.2f |\n", path.Base(n.image), mine, theirs, mine/theirs,
		p99, theirP99, p99/theirP99, single, theirSingle, single/theirSingle)
	return nil
}

// awaitPage asks for a page until it is there, for at most a minute: wasmtime serve compiles first.
func awaitPage(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for ; ; time.Sleep(100 * time.Millisecond) { // pacing of a poll
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("%s: %s", url, response.Status)
		}
		if ctx.Err() != nil {
			return err
		}
	}
}

// What wrk prints.
var (
	wrkRate     = regexp.MustCompile(`(?m)^Requests/sec:\s+([\d.]+)$`)
	wrkP99      = regexp.MustCompile(`(?m)^\s+99%\s+([\d.]+)(us|ms|s) *$`) // wrk pads its units
	wrkFailures = regexp.MustCompile(`(?m)^\s+(Socket errors|Non-2xx).*$`)
)

// wrk asks for a page from the given number of connections, one request after the other on each, and returns the rate, and
// the time in milliseconds that one request in a hundred exceeds, as wrk gives it.
func wrk(ctx context.Context, url string, connections int, duration time.Duration) (rate, p99 float64, err error) {
	out, err := exec.CommandContext(ctx, "wrk", "--threads", "1", "--connections", strconv.Itoa(connections), "--timeout", "10s", "--latency",
		"--duration", fmt.Sprintf("%.0fs", duration.Seconds()), url).CombinedOutput()
	if err != nil {
		return 0, 0, fmt.Errorf("wrk: %w: %s", err, out)
	}
	r, l := wrkRate.FindSubmatch(out), wrkP99.FindSubmatch(out)
	if failures := wrkFailures.Find(out); failures != nil || r == nil || l == nil {
		return 0, 0, fmt.Errorf("wrk %s: %s", url, out)
	}
	took, err := time.ParseDuration(string(l[1]) + string(l[2]))
	if err != nil {
		return 0, 0, err
	}
	rate, err = strconv.ParseFloat(string(r[1]), 64)
	return rate, took.Seconds() * 1000, err
}
