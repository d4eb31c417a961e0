package program

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/accept"
)

// socketUser is a pod of sockets-c.
type socketUser struct{ *pod }

func (w *world) socketUser(rules string, change ...func(*workerapi.PodSpec)) *socketUser {
	return &socketUser{w.caller("sockets-c", rules, change...).pod}
}

// do lets the guest do what a path stands for, and returns the status and the text.
func (u *socketUser) do(path string, headers map[string]string) string {
	t := u.rig.t
	t.Helper()
	r, err := http.NewRequestWithContext(withTimeout(t, time.Minute), http.MethodGet, "http://"+u.cleartext.String()+path, nil)
	require.NoError(t, err)
	for name, value := range headers {
		r.Header.Set(name, value)
	}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return fmt.Sprint(resp.StatusCode, " ", string(text))
}

func (u *socketUser) tcp(to string) string {
	u.rig.t.Helper()
	return u.do("/tcp", map[string]string{"X-To": to, "X-Data": "hello"})
}

func (u *socketUser) udp(to string) string {
	u.rig.t.Helper()
	return u.do("/udp", map[string]string{"X-To": to, "X-Data": "hello"})
}

func (u *socketUser) lookup(name string) string {
	u.rig.t.Helper()
	return u.do("/lookup", map[string]string{"X-Name": name})
}

// echoes starts TCP and UDP servers in the world that answer with what they receive and with the address that it came from.
func (w *world) echoes(at string) (tcp, udp string, accepted *atomic.Int64) {
	w.t.Helper()
	accepted = new(atomic.Int64)
	l, err := net.Listen("tcp", at)
	require.NoError(w.t, err)
	accept.Each(w.t, l, func(conn net.Conn) {
		accepted.Add(1)
		host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
		_, _ = io.Copy(conn, conn)
		fmt.Fprint(conn, " from ", host)
	})
	packets, err := net.ListenPacket("udp4", at)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { packets.Close() })
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
	return l.Addr().String(), packets.LocalAddr().String(), accepted
}

// TestSockets: TCP, UDP and lookups, from the pod's address.
func TestSockets(t *testing.T) {
	w := newWorld(t)
	tcp, udp, _ := w.echoes(worldIP + ":0")
	w.dns.set("example.com", worldIP)
	w.dns.set("api.cluster.test", "10.77.0.9")
	u := w.socketUser("*")
	require.Equal(t, "200 hello from "+podIP, u.tcp(tcp))
	require.Equal(t, "200 hello from "+podIP, u.udp(udp))
	require.Equal(t, "200 hello from "+podIP, u.do("/udp", map[string]string{"X-To": udp, "X-Data": "hello", "X-Many": "1"}))
	require.Equal(t, "200 "+worldIP, u.lookup("example.com"))
	require.Equal(t, "200 10.77.0.9", u.lookup("api"))
	require.Equal(t, "502 name-unresolvable", u.lookup("missing.example"))
	require.Equal(t, "502 connection-refused", u.tcp(worldIP+":1"))
	require.Equal(t, "502 remote-unreachable", u.tcp("192.0.2.1:80"))
	require.Equal(t, "502 connection-refused", u.udp(worldIP+":1"))
	eventually(t, "the sockets of ended instances are closed", func() bool { return u.stats().Holdings.Sockets == 0 })

	none := &socketUser{w.serve("sockets-c")} // a pod without egress
	require.Equal(t, "502 access-denied", none.tcp(tcp))
	require.Equal(t, "502 access-denied", none.udp(udp))
	require.Equal(t, "502 access-denied", none.lookup("example.com"))
}

// TestSocketsObeyTheRules: the rules hold for each address. A name in the rules allows the addresses that the pod's own
// lookups of it have returned, whatever the name means by then.
func TestSocketsObeyTheRules(t *testing.T) {
	w := newWorld(t)
	tcp, udp, _ := w.echoes(worldIP + ":0")
	_, port, _ := net.SplitHostPort(tcp)
	w.dns.set("good.example", worldIP)
	w.dns.set("rebound.example", worldIP, "127.0.0.1")
	w.dns.set("metadata.example", "169.254.169.254")

	all := w.socketUser("*")
	for _, to := range []string{"169.254.169.254:80", "127.0.0.1:80", "224.0.0.1:80", "255.255.255.255:80"} {
		require.Equal(t, "502 access-denied", all.tcp(to), to)
		require.Equal(t, "502 access-denied", all.udp(to), to)
	}
	require.Equal(t, "502 access-denied", all.lookup("metadata.example"))
	require.Equal(t, "502 access-denied", all.lookup("localhost"))

	named := w.socketUser("good.example:" + port + ", rebound.example:" + port)
	require.Equal(t, "502 access-denied", named.tcp(tcp), "before the lookup")
	require.Equal(t, "200 "+worldIP, named.lookup("good.example"))
	require.Equal(t, "200 hello from "+podIP, named.tcp(tcp))
	require.Equal(t, "502 access-denied", named.tcp(worldIP+":1"), "another port")
	require.Equal(t, "502 access-denied", named.udp(udp), "another port")
	before := w.dns.asked()
	require.Equal(t, "502 access-denied", named.lookup("secret.other.test"))
	require.Equal(t, before, w.dns.asked(), "a name that is not allowed was resolved")
	other := w.socketUser("good.example:" + port)
	require.Equal(t, "502 access-denied", other.tcp(tcp), "the lookup was another pod's")

	rebound := w.socketUser("rebound.example:" + port)
	require.Equal(t, "200 "+worldIP, rebound.lookup("rebound.example"))
	require.Equal(t, "200 hello from "+podIP, rebound.tcp(tcp))
	for range 2 {
		require.Equal(t, "502 access-denied", rebound.lookup("rebound.example"))
		require.Equal(t, "502 access-denied", rebound.tcp("127.0.0.1:"+port))
	}
}

// TestSocketsObeyTheFirewallOfThePod: a rule in the pod's network namespace rejects or drops.
func TestSocketsObeyTheFirewallOfThePod(t *testing.T) {
	w := newWorld(t)
	tcp, udp, _ := w.echoes(worldIP + ":0")
	_, tcpPort, _ := net.SplitHostPort(tcp)
	_, udpPort, _ := net.SplitHostPort(udp)
	u := w.socketUser("*", func(s *workerapi.PodSpec) { s.Limits.RequestTimeout = time.Minute })
	require.Equal(t, "200 hello from "+podIP, u.tcp(tcp))
	require.NoError(t, netthread.In(int(w.netns.Fd()), func() error {
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader("table inet t { chain out { type filter hook output priority 0\n" +
			"ip daddr " + worldIP + " tcp dport " + tcpPort + " reject with tcp reset\n" +
			"ip daddr " + worldIP + " udp dport " + udpPort + " drop\n}\n}\n")
		out, err := nft.CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		return nil
	}))
	require.Equal(t, "502 connection-refused", u.tcp(tcp))
	require.Equal(t, "502 access-denied", u.udp(udp)) // send returns EPERM
}

// TestSocketsAreBounded: connections, peers and lookups without end reach limits, and a neighbour is not affected.
func TestSocketsAreBounded(t *testing.T) {
	w := newWorld(t)
	tcp, udp, accepted := w.echoes(worldIP + ":0")
	neighbour := w.socketUser("*")
	hoarder := w.socketUser("*", func(s *workerapi.PodSpec) { s.Holdings.Sockets = 20 })
	require.Equal(t, "200 20 connections, then new-socket-limit", hoarder.do("/hoard", map[string]string{"X-To": tcp}))
	eventually(t, "the connections are accepted", func() bool { return accepted.Load() == 20 })
	eventually(t, "the sockets of the ended instance are closed", func() bool { return hoarder.stats().Holdings.Sockets == 0 })
	require.Equal(t, int64(20), accepted.Load())
	require.Equal(t, "200 20 peers, then new-socket-limit", hoarder.do("/flood", map[string]string{"X-To": worldIP + ":20000", "X-Data": "x"}))
	require.Equal(t, "200 32 peers, then new-socket-limit",
		neighbour.do("/flood", map[string]string{"X-To": worldIP + ":20000", "X-Data": "x"}))
	eventually(t, "the sockets of the ended instance are closed", func() bool { return hoarder.stats().Holdings.Sockets == 0 })

	began := time.Now()
	asking := make(chan string, 1)
	go func() { asking <- hoarder.do("/names", nil) }()
	require.Equal(t, "200 hello from "+podIP, neighbour.tcp(tcp))
	require.Equal(t, "200 hello from "+podIP, neighbour.udp(udp))
	answer := <-asking
	require.Regexp(t, "^200 [0-9]+ lookups, then out-of-memory$", answer)
	// The dialer allows 200 lookups at once and 100 per second. Each has four questions: two full names, A and AAAA.
	require.Less(t, float64(w.dns.different()), 4*(200+100*time.Since(began).Seconds()+1))
	require.Equal(t, "200 hello from "+podIP, hoarder.tcp(tcp))
}
