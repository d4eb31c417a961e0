package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	// floodMax is the limit of connections per address in these tests. floodSize is the number of connections in a flood,
	// and floodQUIC the number over QUIC, whose handshakes cost more.
	floodMax  = 256
	floodSize = 3000
	floodQUIC = 400
)

// floodTCP opens connections that stay open until the end of the test and never send a complete request: they are
// silent, or stop in the middle of a header, a TLS handshake or a CONNECT.
func floodTCP(t *testing.T, address string) {
	t.Helper()
	beginnings := []string{"", "GET / HTTP/1.1\r\nX-Slow: ", "\x16\x03\x01\x02\x00\x01\x00", "\x10\x20\x00\x04MQ", "PRI * HTTP/2.0\r\n"}
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range floodSize / 8 {
				conn, err := net.DialTimeout("tcp", address, 10*time.Second)
				if errors.Is(err, unix.ECONNRESET) {
					continue // the server has displaced it
				}
				if err != nil {
					t.Errorf("connection %d: %v", i, err)
					return
				}
				t.Cleanup(func() { conn.Close() })
				_, _ = io.WriteString(conn, beginnings[(worker+i)%len(beginnings)]) // the server may have closed it
			}
		})
	}
	wg.Wait()
}

// floodUDP opens QUIC connections without requests.
func floodUDP(t *testing.T, address string) {
	t.Helper()
	socket, err := net.ListenUDP("udp", nil)
	if err != nil {
		t.Fatal(err)
	}
	server, err := net.ResolveUDPAddr("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	transport := &quic.Transport{Conn: socket}
	t.Cleanup(func() {
		transport.Close()
		socket.Close()
	})
	for i := range floodQUIC {
		_, err := transport.Dial(t.Context(), server, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h3"}}, nil)
		if refusal, ok := errors.AsType[*quic.TransportError](err); ok && refusal.ErrorCode == quic.ConnectionRefused {
			continue
		}
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
}

// webPage gets a page over a new connection, from the source address from unless it is "".
func webPage(url, from string) (string, error) {
	dialer := &net.Dialer{}
	if from != "" {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	client := &http.Client{Timeout: 10 * time.Second,
		Transport: &http.Transport{TLSClientConfig: anyCertificate, DisableKeepAlives: true, DialContext: dialer.DialContext}}
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// descriptors counts the open descriptors of a process.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// rejected returns the number of rejected connections in a metric, by reason.
func rejected(metrics, series string) map[string]int {
	found := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(series)+`.*reason="(\w+)"} (\S+)$`).FindAllStringSubmatch(metrics, -1) {
		n, _ := strconv.ParseFloat(m[2], 64)
		found[m[1]] += int(n)
	}
	return found
}

// TestC11HalfOpenConnections: during a flood of half-open connections to any port of the node or of its pods, other
// clients are served, and descriptors stay within the limit. Rejected connections are counted, and logged in a few
// lines.
func TestC11HalfOpenConnections(t *testing.T) {
	cert, key := selfSigned(t, t.TempDir())
	broker, brokerTLS := harness.FreeAddress(t), harness.FreeAddress(t)
	metrics := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	streaming := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	bounds := map[string]any{"connections.max": floodMax, "connections.max_per_peer": floodMax / 2, "connections.header_timeout": "5s"}
	d := harness.StartDaemon(t, harness.Edge(t, broker, ""), func(d *harness.Daemon) {
		for key, value := range bounds {
			harness.Set(key, value)(d)
		}
		for key, value := range map[string]any{
			"broker.tls_address": brokerTLS, "broker.certificate": cert, "broker.key": key, "metrics.address": metrics,
			"route.address": routeAddress, "route.cleartext_address": routeCleartext, "grpc.streaming_address": streaming,
		} {
			harness.Set(key, value)(d)
		}
	})
	o := harness.StartOrchestratorWith(t, "mqtt://"+broker, bounds)
	pods := routed(t, d, "one")
	ip := pods["one"].Pod.IP()
	direct := dial(t, ip, greeter)
	shell := d.RunPod(t, harness.PodConfig(t, "shell")).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	hello := func(target string) error {
		s := dialWith(t, target, insecureCredentials)
		s.reflected = direct.reflected
		ctx := metadata.AppendToOutgoingContext(s.context(), "component", "example.com:greet.Greeter@1.0.0")
		_, err := s.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`)
		return err
	}
	// The limit per peer protects other peers, so the other clients have another address.
	const elsewhere = "192.0.2.77"
	ipAddr := func(verb string) error {
		out, err := exec.Command("ip", "address", verb, elsewhere+"/32", "dev", "lo").CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip address %s: %w: %s", verb, err, out)
		}
		return nil
	}
	if err := ipAddr("add"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ipAddr("del"); err != nil {
			t.Error(err)
		}
	})
	fromElsewhere := func(url string) func() error {
		return func() error { _, err := webPage(url, elsewhere); return err }
	}
	page := func(url string) func() error {
		return func() error { _, err := webPage(url, ""); return err }
	}
	overQUIC := func(address string) func() error {
		return func() error {
			client := overHTTP3(t, anyCertificate)
			client.Timeout = 10 * time.Second
			resp, err := client.Get("https://" + address + "/none")
			if err == nil {
				resp.Body.Close()
			}
			return err
		}
	}
	const daemon, rest, pod = `tripod_connections_rejected_total{address="%s"`, `tripod_connections_rejected_total{address="rest"`, "tripod_component_connections_rejected_total"
	var late []func() error // for each address, checks that an idle connection is closed
	for name, port := range map[string]struct {
		address string
		flood   func(*testing.T, string)
		served  func() error
		series  string
		figures string // the address of the metrics
		process func() int
	}{
		"streaming": {streaming, floodTCP, func() error {
			if got := shell.Exec(harness.SPDY, nil, false, "echo", "hello"); got.Stdout != "hello\n" {
				return fmt.Errorf("exec: got %+v, want %q", got, "hello\n")
			}
			return nil
		}, fmt.Sprintf(daemon, "streaming"), metrics, d.Pid},
		"metrics":   {metrics, floodTCP, page("http://" + metrics + "/metrics"), fmt.Sprintf(daemon, "metrics"), metrics, d.Pid},
		"route TLS": {routeAddress, floodTCP, page("https://" + routeAddress + "/none"), fmt.Sprintf(daemon, "route"), metrics, d.Pid},
		"route cleartext": {routeCleartext, floodTCP, func() error { return hello(routeCleartext) }, fmt.Sprintf(daemon, "route"), metrics,
			d.Pid},
		"route QUIC": {routeAddress, floodUDP, overQUIC(routeAddress), fmt.Sprintf(daemon, "route/quic"), metrics, d.Pid},
		"broker": {broker, floodTCP, func() error { return harness.Publish(broker, "app/x", 1, "x") }, fmt.Sprintf(daemon, "broker"),
			metrics, d.Pid},
		"broker TLS": {brokerTLS, floodTCP, func() error {
			_, err := o.Edge("pub", "app/x", "x", "--broker", "mqtts://"+brokerTLS, "--ca", cert, "--timeout", "10s")
			return err
		}, fmt.Sprintf(daemon, "broker"), metrics, d.Pid},
		"REST": {strings.TrimPrefix(o.REST, "http://"), floodTCP, func() error { return o.Get("/api/modules/", &map[string]any{}) },
			rest, strings.TrimPrefix(o.REST, "http://"), o.Pid},
		"pod TLS":       {net.JoinHostPort(ip, "443"), floodTCP, fromElsewhere("https://" + ip + "/none"), pod, metrics, d.Pid},
		"pod cleartext": {net.JoinHostPort(ip, "80"), floodTCP, fromElsewhere("http://" + ip + "/none"), pod, metrics, d.Pid},
		"pod QUIC":      {net.JoinHostPort(ip, "443"), floodUDP, overQUIC(ip), pod, metrics, d.Pid},
	} {
		t.Run(name, func(t *testing.T) {
			figures := func() map[string]int {
				t.Helper()
				text, err := webPage("http://"+port.figures+"/metrics", "")
				if err != nil {
					t.Fatal(err)
				}
				return rejected(text, port.series)
			}
			before, files := figures(), descriptors(t, port.process())
			ctx, end := context.WithCancel(t.Context())
			var others sync.WaitGroup
			defer others.Wait()
			defer end()
			others.Go(func() { // other clients during the flood
				for ctx.Err() == nil {
					if err := port.served(); err != nil {
						t.Errorf("another client during the flood: %v", err)
					}
					if _, err := d.CRI().ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{}); err != nil {
						t.Errorf("ListPodSandbox during the flood: %v", err)
					}
				}
			})
			port.flood(t, port.address)
			if n := descriptors(t, port.process()) - files; n > floodMax*5/4+100 {
				t.Errorf("additional descriptors: got %d, want at most %d", n, floodMax*5/4+100)
			}
			end()
			others.Wait()
			if err := port.served(); err != nil {
				t.Errorf("another client after the flood: %v", err)
			}
			harness.Eventually(t, waitLimit, func() error { // the figures of pods are shared for a moment
				if after := figures(); after["displaced"] == before["displaced"] {
					return fmt.Errorf("rejected connections: got %v, want displaced ones", after)
				}
				return nil
			})
		})
		if strings.Contains(name, "QUIC") {
			continue // this server closes idle connections itself
		}
		conn, err := net.Dial("tcp", port.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		late = append(late, func() error {
			text, err := webPage("http://"+port.figures+"/metrics", "")
			if now := rejected(text, port.series); err != nil || now["expired"] == 0 {
				return fmt.Errorf("%s: rejected connections: got %v, error %v; want expired ones", name, now, err)
			}
			return nil
		})
	}
	harness.Eventually(t, waitLimit, func() error {
		var errs []error
		for _, check := range late {
			errs = append(errs, check())
		}
		return errors.Join(errs...)
	})
	if n := strings.Count(d.DaemonLog(), "connections were rejected"); n == 0 || n > 100 {
		t.Errorf("lines in the log about rejected connections: got %d, want 1 to 100", n)
	}
}

// TestC11DescriptorsForTheCRI: with few descriptors, a flood of a public port leaves enough for the CRI and for pods.
func TestC11DescriptorsForTheCRI(t *testing.T) {
	const files = 600
	streaming := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	d := harness.StartDaemon(t, harness.Set("grpc.streaming_address", streaming))
	if err := unix.Prlimit(d.Pid(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files}, nil); err != nil {
		t.Fatal(err)
	}
	floodTCP(t, streaming)
	c := d.RunPod(t, harness.PodConfig(t, "shell")).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	if got := c.Must("echo", "hello"); got != "hello\n" {
		t.Errorf("ExecSync: got %q, want %q", got, "hello\n")
	}
	if got := c.Exec(harness.SPDY, nil, false, "echo", "hello"); got.Stdout != "hello\n" {
		t.Errorf("exec: got %+v, want %q", got, "hello\n")
	}
	fresh, err := harness.Dial(d.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	if _, err := runtimeapi.NewRuntimeServiceClient(fresh).Version(t.Context(), &runtimeapi.VersionRequest{}); err != nil {
		t.Errorf("Version over a new connection: %v", err)
	}
	if n := descriptors(t, d.Pid()); n > files*3/4 {
		t.Errorf("open descriptors: got %d, want at most %d", n, files*3/4)
	}
}
