package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/tripod-run/tripod/test/accept"
	"github.com/tripod-run/tripod/test/harness"
)

// echoServers starts a TCP and a UDP server on all addresses of the node. They answer with the address of the client.
func echoServers(t *testing.T) (tcpPort, udpPort string) {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	accept.Each(t, l, func(conn net.Conn) {
		text, _ := io.ReadAll(conn)
		host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
		fmt.Fprintf(conn, "%s from %s", text, host)
	})
	packets, err := net.ListenPacket("udp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { packets.Close() })
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := packets.ReadFrom(buf)
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(from.String())
			_, _ = packets.WriteTo(fmt.Appendf(buf[:n:n], " from %s", host), from)
		}
	}()
	_, tcpPort, _ = net.SplitHostPort(l.Addr().String())
	_, udpPort, _ = net.SplitHostPort(packets.LocalAddr().String())
	return tcpPort, udpPort
}

// TestWasmSockets: a component opens TCP and UDP sockets from its pod's address, while the daemon is dead, too.
func TestWasmSockets(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	tcp, udp := echoServers(t)
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.SocketsC})
	ip := c.Pod.IP()
	node := harness.NodeAddress(t, ip)
	do := func(ip, path, to string) string {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+net.JoinHostPort(ip, "80")+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-To", to)
		r.Header.Set("X-Data", "hello")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(resp.StatusCode, " ", string(text))
	}
	reaches := func(when string) {
		t.Helper()
		want := "200 hello from " + ip
		if got := do(ip, "/tcp", net.JoinHostPort(node, tcp)); got != want {
			t.Errorf("%s: TCP: got %q, want %q", when, got, want)
		}
		if got := do(ip, "/udp", net.JoinHostPort(node, udp)); got != want {
			t.Errorf("%s: UDP: got %q, want %q", when, got, want)
		}
	}
	reaches("with a daemon")
	d.Kill()
	reaches("without a daemon")
	d.Start()
	reaches("after the daemon's restart")
	limited := d.RunWasm(t, &harness.PodSpec{Image: harness.SocketsC, Pod: []harness.PodOption{annotate("egress", node+":"+tcp)}})
	limitedIP := limited.Pod.IP()
	if got, want := do(limitedIP, "/tcp", net.JoinHostPort(node, tcp)), "200 hello from "+limitedIP; got != want {
		t.Errorf("an allowed port: got %q, want %q", got, want)
	}
	if got := do(limitedIP, "/udp", net.JoinHostPort(node, udp)); got != "502 access-denied" {
		t.Errorf("another port: got %q, want access-denied", got)
	}
}
