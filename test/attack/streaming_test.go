package attack

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// halfOpen opens n connections to an address, sends beginning on each, and keeps them open until closeAll.
func halfOpen(address, beginning string, n int) (closeAll func()) {
	var wg sync.WaitGroup
	open := make(chan net.Conn, n)
	for range 8 {
		wg.Go(func() {
			for range n / 8 {
				conn, err := net.DialTimeout("tcp", address, time.Second)
				if err != nil {
					continue // the server refused it
				}
				open <- conn
				_, _ = io.WriteString(conn, beginning) // the server may have closed it
			}
		})
	}
	wg.Wait()
	close(open)
	return func() {
		for conn := range open {
			conn.Close()
		}
	}
}

// TestStreamingClient: the attacker can connect to the streaming port, with a URL from the kubelet or without.
func TestStreamingClient(t *testing.T) {
	g := open(t)
	pod := g.d.RunPod(t, harness.PodConfig(t, "victim"))
	t.Cleanup(pod.Remove)
	config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("cat >/dev/null"))
	config.Stdin = true
	c := pod.Run(config)
	exec := func(t *testing.T, argv ...string) *url.URL {
		t.Helper()
		resp, err := g.d.CRI().Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: c.ID, Cmd: argv, Stdin: true, Stdout: true, Stderr: true})
		if err != nil {
			t.Fatal(err)
		}
		u, err := url.Parse(resp.Url)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	server := exec(t, "true").Host
	works := func(t *testing.T) {
		t.Helper()
		if r := c.Exec(harness.WebSocket, nil, false, "echo", "hello"); r.Stdout != "hello\n" {
			t.Errorf("exec of echo: got %+v, want %q", r, "hello\n")
		}
	}
	for name, beginning := range map[string]string{
		"silence": "", "half a request": "GET /exec/", "half a header": "GET /exec/x HTTP/1.1\r\nHost: x\r\nX-Slow: ",
		"half a body": "POST /exec/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx",
	} {
		g.attack(name, func(t *testing.T) {
			defer halfOpen(server, beginning, 2000)()
			works(t)
		})
	}
	g.attack("guesses", func(t *testing.T) {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		for _, path := range []string{"/exec/" + rand.Text(), "/attach/" + rand.Text(), "/portforward/" + rand.Text(), "/exec/", "/",
			"/exec/../../etc/passwd", "/cri/exec/" + strings.Repeat("x", 100_000)} {
			resp, err := client.Post("http://"+server+path, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp.Body.Close(); resp.StatusCode < 400 {
				t.Errorf("POST %.40s: got status %s, want an error", path, resp.Status)
			}
		}
	})
	g.attack("a URL that was used", func(t *testing.T) {
		u := exec(t, "true")
		for i := range 3 {
			code, err := harness.Stream(t.Context(), harness.WebSocket, u.String(),
				remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard})
			if used := i > 0; used == (err == nil) {
				t.Errorf("use %d of the URL: got exit code %d, error %v; want an error on every use but the first", i, code, err)
			}
		}
	})
	g.attack("large headers", func(t *testing.T) {
		conn, err := net.Dial("tcp", server)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go func() {
			_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n")
			for line := []byte("X-Bomb: " + strings.Repeat("x", 1<<16) + "\r\n"); ; {
				if _, err := conn.Write(line); err != nil {
					return
				}
			}
		}()
		_ = conn.SetReadDeadline(time.Now().Add(waitLimit))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err == nil && resp.StatusCode < 400 {
			t.Errorf("request with endless headers: got status %s, want an error", resp.Status)
		}
		if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
			t.Error("the server reads headers without limit")
		}
	})
	// A client sends to a program that does not read, and a program writes to a client that does not read.
	g.attack("nobody reads", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), caseTime)
		defer cancel()
		full, stop := io.Pipe()
		defer stop.Close()
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				_, _ = harness.Stream(ctx, harness.SPDY, exec(t, "sleep", "3").String(),
					remotecommand.StreamOptions{Stdin: zeros{}, Stdout: io.Discard, Stderr: io.Discard})
			})
			wg.Go(func() {
				_, _ = harness.Stream(ctx, harness.WebSocket, exec(t, "yes").String(),
					remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: stop, Stderr: io.Discard})
			})
		}
		works(t)
		<-ctx.Done()
		full.Close()
		wg.Wait()
	})
	g.attack("clients that vanish", func(t *testing.T) {
		limit := make(chan struct{}, 16)
		var wg sync.WaitGroup
		for range 100 {
			limit <- struct{}{}
			wg.Go(func() {
				defer func() { <-limit }()
				u := exec(t, "sh", "-c", "cat; sleep 3600")
				conn, err := net.Dial("tcp", u.Host)
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n", u.RequestURI())
				if _, err := conn.Read(make([]byte, 1)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
	g.attack("rubbish in a stream", func(t *testing.T) {
		for _, upgrade := range []string{"SPDY/3.1", "websocket"} {
			u := exec(t, "cat")
			conn, err := net.Dial("tcp", u.Host)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n", u.RequestURI(), upgrade)
			_, _ = io.CopyN(conn, rand.Reader, 1<<20) // the server may close the connection early
			conn.Close()
		}
		works(t)
	})
	g.attack("ports of nobody", func(t *testing.T) {
		for range 5 { // the client closes its connection on the first failure
			conn, err := net.Dial("tcp", pod.Forward(t, 9))
			if err != nil {
				t.Fatal(err)
			}
			_ = conn.SetReadDeadline(time.Now().Add(waitLimit))
			if _, err := io.Copy(io.Discard, conn); err != nil {
				t.Log(err)
			}
			conn.Close()
		}
	})
}
