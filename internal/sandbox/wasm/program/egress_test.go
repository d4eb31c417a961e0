package program

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// The network of the tests: a pod with a namespace of its own, and the world, which is the test's namespace.
const (
	worldIP = "10.77.0.1"
	podIP   = "10.77.0.2"
)

// world is a network with a dialer, and with servers that pods can call.
type world struct {
	*rig
	netns   *os.File // the pod's
	control string
	dialer  *exec.Cmd
	ended   chan struct{}
	dns     *nameServer
	roots   *os.File
}

// newWorld starts a worker and a dialer like the daemon does it.
func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root, for network namespaces")
	}
	w := &world{rig: startWorker(t, workerapi.WorkerConfig{}), netns: podNetns(t), dns: serveNames(t)}
	w.startDialer()
	return w
}

func (w *world) startDialer() {
	t := w.t
	w.control, w.ended = filepath.Join(w.dir, "dialer.sock"), make(chan struct{})
	os.Remove(w.control)
	ready, report, err := os.Pipe()
	require.NoError(t, err)
	w.dialer = program(t, "dialer", asJSON(t, workerapi.DialerConfig{Name: "test", Isolated: true, Idle: time.Minute}))
	self, err := os.Open(w.dialer.Path)
	require.NoError(t, err)
	w.dialer.ExtraFiles = []*os.File{listenUnix(t, w.control), report, self}
	w.dialer.Path = "/proc/self/fd/5" // its user cannot enter the directory of the test binary
	w.dialer.Stderr = w.log
	w.dialer.SysProcAttr.Cloneflags = workerapi.Namespaces
	w.dialer.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	w.dialer.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	require.NoError(t, w.dialer.Start())
	for _, f := range w.dialer.ExtraFiles {
		f.Close()
	}
	go func(c *exec.Cmd, ended chan struct{}) { _ = c.Wait(); close(ended) }(w.dialer, w.ended)
	t.Cleanup(func() { _ = w.dialer.Process.Kill(); <-w.ended })
	line, err := bufio.NewReader(ready).ReadString('\n')
	ready.Close()
	require.NoError(t, err, "the dialer is not ready: %s", w.logText())
	require.Equal(t, "ready\n", line)
}

// podNetns makes a network namespace that is connected with the test's by a veth pair.
func podNetns(t testing.TB) *os.File {
	t.Helper()
	var netns *os.File
	var err error
	netthread.Run(func() bool {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			netns, err = os.Open("/proc/thread-self/ns/net")
		}
		return false
	})
	require.NoError(t, err)
	t.Cleanup(func() { netns.Close() })
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "tpworld"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(netns.Fd()))}
	require.NoError(t, netlink.LinkAdd(veth))
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	require.NoError(t, address("tpworld", worldIP))
	require.NoError(t, netthread.In(int(netns.Fd()), func() error {
		if err := address("lo", ""); err != nil {
			return err
		}
		return address("eth0", podIP)
	}))
	return netns
}

func address(name, ip string) error {
	handle, err := netthread.Handle()
	if err != nil {
		return err
	}
	defer handle.Close()
	link, err := handle.LinkByName(name)
	if err != nil {
		return err
	}
	if ip != "" {
		addr, err := netlink.ParseAddr(ip + "/24")
		if err != nil {
			return err
		}
		if err := handle.AddrAdd(link, addr); err != nil {
			return err
		}
	}
	return handle.LinkSetUp(link)
}

// nameServer answers queries for A records from a table. The last address of a list answers all further queries.
type nameServer struct {
	mu      sync.Mutex
	answers map[string][]string
	queries int
	// questions has each question once, although a client repeats one whose datagram was lost.
	questions map[dnsmessage.Question]bool
}

func serveNames(t testing.TB) *nameServer {
	t.Helper()
	s := &nameServer{answers: map[string][]string{}, questions: map[dnsmessage.Question]bool{}}
	conn, err := net.ListenPacket("udp", worldIP+":53")
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply := s.answer(buf[:n]); reply != nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	}()
	return s
}

func (s *nameServer) set(name string, addrs ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[name+"."] = addrs
}

func (s *nameServer) asked() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.queries
}

func (s *nameServer) different() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.questions)
}

func (s *nameServer) answer(query []byte) []byte {
	var m dnsmessage.Message
	if m.Unpack(query) != nil || len(m.Questions) != 1 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queries++
	q := m.Questions[0]
	s.questions[q] = true
	m.Response, m.Additionals = true, nil
	addrs, known := s.answers[q.Name.String()]
	if !known {
		m.RCode = dnsmessage.RCodeNameError
	}
	if known && q.Type == dnsmessage.TypeA {
		m.Answers = append(m.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
			Body:   &dnsmessage.AResource{A: netip.MustParseAddr(addrs[0]).As4()},
		})
		if len(addrs) > 1 {
			s.answers[q.Name.String()] = addrs[1:]
		}
	}
	reply, _ := m.Pack()
	return reply
}

// order connects a pod to the dialer and returns the worker's end.
func (w *world) order(rules string) *os.File {
	w.t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(w.t, err)
	workers, dialers := os.NewFile(uintptr(fds[0]), ""), os.NewFile(uintptr(fds[1]), "")
	defer dialers.Close()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: w.control})
	require.NoError(w.t, err)
	o := egress.Order{Pod: "test", Rules: rules,
		DNS: egress.DNS{Servers: []string{worldIP}, Searches: []string{"cluster.test"}, Options: []string{"timeout:1"}}}
	require.NoError(w.t, o.Send(withTimeout(w.t, 10*time.Second), conn, w.netns, dialers))
	return workers
}

// caller starts a pod of an example with egress rules.
func (w *world) caller(example, rules string, change ...func(*workerapi.PodSpec)) *caller {
	w.t.Helper()
	p := w.serve(example, append([]func(*workerapi.PodSpec){func(s *workerapi.PodSpec) {
		s.Egress = &workerapi.Egress{Dialer: workerapi.File{File: w.order(rules)}}
		if w.roots != nil {
			roots, err := os.Open(w.roots.Name())
			require.NoError(w.t, err)
			s.Egress.Roots.File = roots
		}
	}}, change...)...)
	return &caller{p}
}

type caller struct{ *pod }

// do lets the guest send a request to a URL.
func (c *caller) do(ctx context.Context, method, path, url string, body io.Reader, headers ...string) *http.Response {
	t := c.rig.t
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+c.cleartext.String()+path, body)
	require.NoError(t, err)
	r.Header.Set("X-Url", url)
	for _, h := range headers {
		r.Header.Set(h, "1")
	}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// fetch returns the status and the body, which is an error-code if the status is 502.
func (c *caller) fetch(url string, headers ...string) (int, string) {
	c.rig.t.Helper()
	resp := c.do(withTimeout(c.rig.t, 30*time.Second), http.MethodGet, "/fetch", url, nil, headers...)
	text, err := io.ReadAll(resp.Body)
	require.NoError(c.rig.t, err)
	return resp.StatusCode, string(text)
}

func (c *caller) requireCode(code, url string, headers ...string) {
	c.rig.t.Helper()
	status, body := c.fetch(url, headers...)
	require.Equal(c.rig.t, fmt.Sprint(http.StatusBadGateway, " ", code), fmt.Sprint(status, " ", body), url)
}

// listen starts a server in the world, or at another address.
func (w *world) listen(at string, handler http.HandlerFunc, secure bool) *httptest.Server {
	w.t.Helper()
	l, err := net.Listen("tcp", at)
	require.NoError(w.t, err)
	s := httptest.NewUnstartedServer(handler)
	s.Listener.Close()
	s.Listener = l
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	if secure {
		s.EnableHTTP2 = true
		s.TLS = &tls.Config{}
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(s.Close)
	return s
}

func hello(w http.ResponseWriter, r *http.Request) {
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	fmt.Fprintf(w, "%s %s %s from %s", r.Proto, r.Method, r.Host, host)
}

func portOf(s *httptest.Server) string {
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	return port
}

// TestEgress: a guest calls out from its pod's address, by address and by name, over HTTP/1.1 and HTTP/2.
func TestEgress(t *testing.T) {
	w := newWorld(t)
	plain := w.listen(worldIP+":0", hello, false)
	secure := w.listen(worldIP+":0", hello, true)
	w.roots = filepathFile(t, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}))
	w.dns.set("example.com", worldIP) // httptest's certificate is for example.com
	w.dns.set("api.cluster.test", worldIP)
	c := w.caller("fetch-c", "*")
	status, body := c.fetch(plain.URL + "/")
	require.Equal(t, http.StatusOK, status, body)
	require.Equal(t, "HTTP/1.1 GET "+plain.Listener.Addr().String()+" from "+podIP, body)
	_, body = c.fetch("http://api:" + portOf(plain) + "/")
	require.Equal(t, "HTTP/1.1 GET api:"+portOf(plain)+" from "+podIP, body)
	for range 3 {
		_, body = c.fetch("https://example.com:" + portOf(secure) + "/")
		require.Equal(t, "HTTP/2.0 GET example.com:"+portOf(secure)+" from "+podIP, body)
	}
	c.requireCode("TLS-certificate-error", "https://api:"+portOf(secure)+"/")
	c.requireCode("connection-refused", "http://"+worldIP+":1/")
	c.requireCode("destination-IP-unroutable", "http://192.0.2.1/")
	c.requireCode("DNS-error", "http://missing.example/")
	c.requireCode("TLS-protocol-error", "https://"+plain.Listener.Addr().String()+"/")
	require.Positive(t, c.stats().Holdings.Sockets)
	sent := bytes.Repeat([]byte("0123456789"), 200_000)
	echo := w.listen(worldIP+":0", func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }, false)
	resp := c.do(t.Context(), http.MethodPost, "/fetch", echo.URL+"/", bytes.NewReader(sent))
	_, _ = io.Copy(io.Discard, resp.Body)

	_, err := w.Stop(t.Context(), c.ID, 0)
	require.NoError(t, err)
	none := w.serve("fetch-c") // a pod without egress
	(&caller{none}).requireCode("HTTP-request-denied", plain.URL+"/")
}

func filepathFile(t testing.TB, content []byte) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "roots")
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	_, err = f.Write(content)
	require.NoError(t, err)
	return f
}

// TestEgressRules: the rules hold for each connection, wherever names and redirects lead.
func TestEgressRules(t *testing.T) {
	w := newWorld(t)
	var to string
	server := w.listen(worldIP+":0", func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/redirect" {
			http.Redirect(rw, r, to, http.StatusFound)
			return
		}
		rw.Header().Set("Connection", "close") // so that each request needs a connection
		hello(rw, r)
	}, false)
	port := portOf(server)
	var inside net.Listener // the pod's own loopback
	require.NoError(t, netthread.In(int(w.netns.Fd()), func() (err error) {
		inside, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	t.Cleanup(func() { inside.Close() })
	go func() { _ = http.Serve(inside, http.HandlerFunc(hello)) }()
	w.dns.set("good.example", worldIP)
	w.dns.set("rebound.example", worldIP, "127.0.0.1")
	w.dns.set("metadata.example", "169.254.169.254")

	all := w.caller("fetch-c", "*")
	for _, url := range []string{"http://169.254.169.254/", "http://127.0.0.1/", "http://[::1]/", "http://0.0.0.0/",
		"http://[::ffff:127.0.0.1]/",
		"http://localhost/", "http://metadata.example/", "http://[fe80::1]/", "http://224.0.0.1/", "http://255.255.255.255/"} {
		all.requireCode("destination-IP-prohibited", url)
	}
	for _, to = range []string{"http://169.254.169.254/latest/meta-data/", "http://" + inside.Addr().String() + "/"} {
		all.requireCode("destination-IP-prohibited", server.URL+"/redirect", "X-Follow")
	}
	to = "http://good.example:" + port + "/"
	status, body := all.fetch(server.URL+"/redirect", "X-Follow")
	require.Equal(t, http.StatusOK, status, body)

	named := w.caller("fetch-c", "good.example:"+port+", *.example:"+port)
	status, body = named.fetch("http://good.example:" + port + "/")
	require.Equal(t, http.StatusOK, status, body)
	named.requireCode("HTTP-request-denied", "http://good.example:1/")
	named.requireCode("destination-IP-prohibited", server.URL+"/") // by address
	before := w.dns.asked()
	named.requireCode("HTTP-request-denied", "http://secret.other.test:"+port+"/")
	require.Equal(t, before, w.dns.asked(), "a name that is not allowed was resolved")
	status, body = named.fetch("http://rebound.example:" + port + "/")
	require.Equal(t, http.StatusOK, status, body)
	for range 3 {
		named.requireCode("destination-IP-prohibited", "http://rebound.example:"+port+"/")
	}

	loopback := w.caller("fetch-c", "127.0.0.1/32")
	status, body = loopback.fetch("http://" + inside.Addr().String() + "/")
	require.Equal(t, http.StatusOK, status, body)
	loopback.requireCode("destination-IP-prohibited", server.URL+"/")
}

// TestEgressObeysTheFirewallOfThePod: a rule in the pod's network namespace, like those of NetworkPolicies, applies.
func TestEgressObeysTheFirewallOfThePod(t *testing.T) {
	w := newWorld(t)
	server := w.listen(worldIP+":0", hello, false)
	c := w.caller("fetch-c", "*")
	status, body := c.fetch(server.URL + "/")
	require.Equal(t, http.StatusOK, status, body)
	require.NoError(t, netthread.In(int(w.netns.Fd()), func() error {
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader("table inet t { chain out { type filter hook output priority 0; ip daddr " + worldIP + " tcp dport " +
			portOf(server) + " reject with icmp admin-prohibited\n}\n}\n")
		out, err := nft.CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		return nil
	}))
	server.CloseClientConnections()
	status, body = c.fetch(server.URL + "/")
	require.Equal(t, fmt.Sprint(http.StatusBadGateway, " destination-IP-unroutable"), fmt.Sprint(status, " ", body))
}

// TestEgressIsBounded: a guest that opens connections without end reaches a limit, and its neighbour is not affected.
func TestEgressIsBounded(t *testing.T) {
	w := newWorld(t)
	block := make(chan struct{})
	server := w.listen(worldIP+":0", func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			hello(rw, r)
			return
		}
		http.NewResponseController(rw).Flush()
		select {
		case <-block:
		case <-r.Context().Done():
		}
	}, false)
	defer close(block)
	neighbour := w.caller("fetch-c", "*")
	hoarder := w.caller("fetch-c", "*", func(s *workerapi.PodSpec) { s.Holdings.Sockets = 20 })
	resp := hoarder.do(withTimeout(t, time.Minute), http.MethodGet, "/hoard", server.URL+"/forever", nil)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "20 calls, then connection-limit-reached", string(text))
	eventually(t, "the sockets of the ended instance are closed", func() bool { return hoarder.stats().Holdings.Sockets == 0 })
	status, body := neighbour.fetch(server.URL + "/")
	require.Equal(t, http.StatusOK, status, body)
}

// TestEgressAfterTheDialer: when the dialer dies, calls fail until the pod is connected to another one. Open
// connections are not affected.
func TestEgressAfterTheDialer(t *testing.T) {
	w := newWorld(t)
	next := make(chan struct{})
	server := w.listen(worldIP+":0", func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			hello(rw, r)
			return
		}
		for range 3 {
			fmt.Fprintln(rw, "part")
			http.NewResponseController(rw).Flush()
			<-next
		}
	}, false)
	c := w.caller("fetch-c", "*")
	resp := c.do(t.Context(), http.MethodGet, "/fetch", server.URL+"/parts", nil)
	lines := bufio.NewReader(resp.Body)
	_, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, w.dialer.Process.Kill())
	<-w.ended
	c.requireCode("destination-unavailable", server.URL+"/")
	close(next)
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.Equal(t, "part\npart\n", string(rest))
	w.startDialer()
	conn := w.order("*")
	defer conn.Close()
	require.NoError(t, w.UpdateDialer(t.Context(), c.ID, conn))
	status, body := c.fetch(server.URL + "/")
	require.Equal(t, http.StatusOK, status, body)
	require.Error(t, w.UpdateDialer(t.Context(), "unknown", conn))
}
