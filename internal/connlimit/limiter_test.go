package connlimit

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// buffer is a log that can be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) lines() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.b.String(), "\n")
}

func newLimiter(c Config) (*Limiter, *Group, *buffer) {
	log := &buffer{}
	g := NewGroup(slog.New(slog.NewTextHandler(log, nil)))
	return g.Limiter("door", c), g, log
}

func from(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1} }

// admit admits a connection that appends its name to displaced when it is displaced.
func admit(t *testing.T, l *Limiter, ip, name string, displaced *[]string) *Conn {
	t.Helper()
	c, err := l.Admit(from(ip), func() { *displaced = append(*displaced, name) })
	if err != nil {
		t.Fatalf("Admit of connection %s: %v", name, err)
	}
	return c
}

func wantDisplaced(t *testing.T, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("displaced connections = %v, want %v", got, want)
	}
}

// TestDisplace checks that connections that are not busy make room, the oldest first, and new ones before idle ones
// while there are many of them. If all are busy, the next connection is refused.
func TestDisplace(t *testing.T) {
	l, _, log := newLimiter(Config{Max: 4, MaxPerPeer: -1})
	var gone []string
	busy := admit(t, l, "192.0.2.1", "busy", &gone)
	busy.Begin()
	idle := admit(t, l, "192.0.2.1", "idle", &gone)
	idle.Begin()
	idle.End()
	admit(t, l, "192.0.2.1", "new1", &gone)
	new2 := admit(t, l, "192.0.2.1", "new2", &gone)
	wantDisplaced(t, gone)
	new3 := admit(t, l, "192.0.2.1", "new3", &gone) // two of four are new
	wantDisplaced(t, gone, "new1")
	new2.Begin()
	new4 := admit(t, l, "192.0.2.1", "new4", &gone) // one of four is new
	wantDisplaced(t, gone, "new1", "idle")
	new3.Begin()
	new4.Begin()
	if _, err := l.Admit(from("192.0.2.2"), nil); !errors.Is(err, ErrRefused) {
		t.Errorf("Admit while all are busy = %v, want ErrRefused", err)
	}
	idle.Leave() // was displaced, so this does nothing
	if s := l.Stats(); s.Open != 4 || s.Rejected[ReasonDisplaced] != 2 || s.Rejected[ReasonMax] != 1 {
		t.Errorf("Stats = %+v, want 4 open, 2 displaced and 1 refused", s)
	}
	for _, c := range []*Conn{busy, new2, new3, new4, new4} {
		c.Leave()
		c.End()
	}
	if s := l.Stats(); s.Open != 0 || l.fresh.Len()+l.idle.Len() != 0 || l.group.held.Load() != 0 {
		t.Errorf("after all have left: %+v, %d new, %d idle, %d files, want none", s, l.fresh.Len(), l.idle.Len(), l.group.held.Load())
	}
	if n := log.lines(); n != 1 {
		t.Errorf("%d log lines, want 1", n)
	}
	l.flush()
	if n := log.lines(); n != 2 {
		t.Errorf("%d log lines after flush, want 2", n)
	}
}

// TestPatience checks that the next connection waits only while it would displace a connection younger than minAge.
func TestPatience(t *testing.T) {
	l, _, _ := newLimiter(Config{Max: 2, MaxPerPeer: -1})
	var gone []string
	first := admit(t, l, "192.0.2.1", "first", &gone)
	if wait := l.acceptDelay(); wait != 0 {
		t.Errorf("acceptDelay with room = %v, want 0", wait)
	}
	second := admit(t, l, "192.0.2.1", "second", &gone)
	first.since = time.Now().Add(time.Hour)
	if wait := l.acceptDelay(); wait <= minAge {
		t.Errorf("acceptDelay with new connections = %v, want more than %v", wait, minAge)
	}
	first.since = time.Now().Add(-time.Hour)
	if wait := l.acceptDelay(); wait > 0 {
		t.Errorf("acceptDelay with an old connection = %v, want none", wait)
	}
	first.Begin()
	second.Begin()
	if wait := l.acceptDelay(); wait != 0 {
		t.Errorf("acceptDelay with busy connections = %v, want 0", wait)
	}
}

// TestPerPeer checks that a peer at its limit displaces only its own connections, and that IPv6 addresses of one /64
// count as one peer.
func TestPerPeer(t *testing.T) {
	l, _, _ := newLimiter(Config{Max: 100, MaxPerPeer: 2})
	var gone []string
	admit(t, l, "192.0.2.9", "other", &gone)
	for i := range 4 {
		admit(t, l, "192.0.2.1", fmt.Sprint(i), &gone)
	}
	wantDisplaced(t, gone, "0", "1")
	gone = nil
	for i := range 3 {
		admit(t, l, fmt.Sprintf("2001:db8::%d", i), fmt.Sprint(i), &gone).Begin()
		if i == 1 {
			break
		}
	}
	if _, err := l.Admit(from("2001:db8::ffff"), nil); !errors.Is(err, ErrRefused) {
		t.Errorf("Admit of a third connection from one /64 = %v, want ErrRefused", err)
	}
	admit(t, l, "2001:db8:0:1::1", "neighbour", &gone)
	for range 10 {
		admit(t, l, "127.0.0.1", "loopback", &gone)
		admit(t, l, "::ffff:127.0.0.1", "loopback", &gone)
	}
	wantDisplaced(t, gone)
}

// TestFiles checks that the addresses of a process share its descriptors, and that an address at the limit displaces
// only its own connections.
func TestFiles(t *testing.T) {
	l, g, _ := newLimiter(Config{Max: 1000, MaxPerPeer: -1, Files: 3})
	g.budget = func() int64 { return 10 }
	var gone []string
	for i := range 5 {
		admit(t, l, "192.0.2.1", fmt.Sprint(i), &gone)
	}
	wantDisplaced(t, gone, "0", "1")
	other := g.Limiter("other", Config{})
	admit(t, other, "192.0.2.1", "other", &gone).Begin()
	if _, err := other.Admit(from("192.0.2.1"), nil); !errors.Is(err, ErrRefused) || other.Stats().Rejected[ReasonFiles] != 1 {
		t.Errorf("Admit without free descriptors = %v, %+v, want ErrRefused with reason %s", err, other.Stats(), ReasonFiles)
	}
	if n := g.held.Load(); n != 10 {
		t.Errorf("%d descriptors are held, want 10", n)
	}
}

// TestHTTPServer checks the states of an HTTP server's connections, including keep-alive and slow headers.
func TestHTTPServer(t *testing.T) {
	l, _, _ := newLimiter(Config{Max: 8, HeaderTimeout: 300 * time.Millisecond})
	release := make(chan struct{})
	server := l.HTTPServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			<-release
		}
	}))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(l.Listener(ln))
	t.Cleanup(func() { server.Close() })
	dial := func(request string) net.Conn {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprint(c, request)
		return c
	}
	status := func(c net.Conn) string {
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return err.Error()
		}
		return strings.TrimSpace(line)
	}
	waiting := dial("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
	idle := dial("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if s := status(idle); s != "HTTP/1.1 200 OK" {
		t.Fatal(s)
	}
	slow := dial("GET / HTTP/1.1\r\nX-Slow: ")
	slow.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadAll(slow); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the server did not close a connection with an unfinished header within 10 s")
	}
	if n := l.Stats().Rejected[ReasonExpired]; n != 1 {
		t.Errorf("%d connections have expired, want 1", n)
	}
	for range 40 {
		dial("") // sends nothing
	}
	if s := status(dial("GET / HTTP/1.1\r\nHost: x\r\n\r\n")); s != "HTTP/1.1 200 OK" {
		t.Errorf("status for a new connection = %s, want 200 OK", s)
	}
	close(release)
	if s := status(waiting); s != "HTTP/1.1 200 OK" {
		t.Errorf("status for the busy connection = %s, want 200 OK", s)
	}
	if s := l.Stats(); s.Open > 8 || s.Rejected[ReasonDisplaced] < 30 {
		t.Errorf("Stats = %+v, want at most 8 open and at least 30 displaced", s)
	}
}
