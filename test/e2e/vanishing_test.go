package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVanishingClients tests fault C5: clients that disconnect abruptly leave nothing behind in the daemon.
func TestVanishingClients(t *testing.T) {
	const clients = 300
	debug := harness.Dir() + "/debug.sock"
	d := harness.StartDaemon(t, harness.Set("debug.socket", debug))
	p := startPod(t, d)
	config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("cat"))
	config.Stdin = true
	c := p.Run(config)
	visit := []func() error{
		func() error { return leaveEarly(t, execURL(t, d, c, false, "sleep", "3600"), "v4.channel.k8s.io") },
		func() error { return leaveEarly(t, c.AttachURL(true, false), "v4.channel.k8s.io") },
		func() error {
			resp, err := d.Runtime().PortForward(context.Background(), &runtimeapi.PortForwardRequest{PodSandboxId: p.ID, Port: []int32{80}})
			if err != nil {
				return err
			}
			return leaveEarly(t, resp.Url, "portforward.k8s.io")
		},
		func() error { return leaveLate(harness.SPDY, c.AttachURL(true, false)) },
		func() error { return leaveLate(harness.WebSocket, c.AttachURL(true, false)) },
		func() error {
			return leaveLate(harness.SPDY, execURL(t, d, c, false, "sh", "-c", "echo up; cat; sleep 3600"))
		},
	}
	round := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		limit := make(chan struct{}, 20)
		for i := range n {
			limit <- struct{}{}
			wg.Go(func() {
				defer func() { <-limit }()
				if err := visit[i%len(visit)](); err != nil {
					t.Errorf("client %d: %v", i, err)
				}
			})
		}
		wg.Wait()
	}
	round(2 * len(visit)) // creates what is created only once
	c.Must("true")
	var before harness.Resources
	var goroutinesBefore int
	harness.Eventually(t, waitLimit, func() error {
		before, goroutinesBefore = harness.Snapshot(d), goroutines(t, debug)
		if len(before.Processes) > 3 {
			return fmt.Errorf("processes: got %v, want at most three kinds", before.Processes)
		}
		return nil
	})
	round(clients)
	if s := c.Status(); s.State != running {
		t.Fatalf("status of the container: got %v, want running", s)
	}
	// The daemon waits half a minute for clients that disconnect before they open a stream.
	harness.Eventually(t, 2*waitLimit, func() error {
		if n := goroutines(t, debug); n > goroutinesBefore+5 {
			return fmt.Errorf("goroutines: got %d, want at most %d", n, goroutinesBefore+5)
		}
		return before.Leaks(harness.Snapshot(d))
	})
	c.Must("true")
}

// leaveEarly upgrades a connection to SPDY and closes it before it opens a stream.
func leaveEarly(t *testing.T, rawURL, protocol string) error {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		return err
	}
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		return err
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: %s\r\n\r\n",
		u.RequestURI(), u.Host, protocol)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return fmt.Errorf("upgrade: got status %s, want 101", resp.Status)
	}
	return nil
}

// leaveLate disconnects after the first output.
func leaveLate(p harness.Protocol, rawURL string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stdin, say := io.Pipe()
	defer say.Close()
	go func() { _, _ = io.WriteString(say, "hello\n") }()
	seen := writer(func(p []byte) (int, error) { cancel(); return len(p), nil })
	_, err := harness.Stream(ctx, p, rawURL, remotecommand.StreamOptions{Stdin: stdin, Stdout: seen, Stderr: seen})
	if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("stream without output: %v", err)
	}
	return nil
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

var goroutineTotal = regexp.MustCompile(`^goroutine profile: total (\d+)`)

// goroutines returns the number of the daemon's goroutines.
func goroutines(t *testing.T, socket string) int {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	resp, err := client.Get("http://debug/debug/pprof/goroutine?debug=1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := goroutineTotal.FindSubmatch(data)
	if m == nil {
		t.Fatalf("goroutine profile: got %.100q, want a total", data)
	}
	n, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return n
}
