package dialer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/test/until"
)

// rig is a dialer in the test's process, whose pods are in the test's network namespace.
type rig struct {
	t      testing.TB
	path   string
	server *Server
	served chan error
}

func newRig(t testing.TB, idle time.Duration) *rig {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root, because a dialer takes orders only from root and enters network namespaces")
	}
	r := &rig{t: t, path: filepath.Join(t.TempDir(), "s"), served: make(chan error, 1)}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.path})
	if err != nil {
		t.Fatal(err)
	}
	r.server = New(l, idle, slog.New(slog.DiscardHandler))
	go func() { r.served <- r.server.Serve() }()
	return r
}

func (r *rig) order(o egress.Order, files ...*os.File) error {
	r.t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.path})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	return o.Send(ctx, conn, files[0], files[1])
}

// pod orders a pod and returns the worker's end of its connection.
func (r *rig) pod(rules string, dns egress.DNS) *net.UnixConn {
	r.t.Helper()
	netns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		r.t.Fatal(err)
	}
	defer netns.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), ""), os.NewFile(uintptr(fds[1]), "")
	defer ours.Close()
	defer theirs.Close()
	if err := r.order(egress.Order{Pod: "p", Rules: rules, DNS: dns}, netns, theirs); err != nil {
		r.t.Fatal(err)
	}
	conn, err := net.FileConn(ours)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn.(*net.UnixConn)
}

func TestIdleDialerEnds(t *testing.T) {
	r := newRig(t, 100*time.Millisecond)
	conn := r.pod("*", egress.DNS{})
	select {
	case err := <-r.served:
		t.Fatalf("the dialer ended although it has a pod: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	conn.Close()
	if err := <-r.served; err != nil {
		t.Errorf("Serve = %v", err)
	}
	if err := r.order(egress.Order{}, os.Stdin, os.Stdin); err == nil {
		t.Error("an ended dialer took an order")
	}
}

func TestDrain(t *testing.T) {
	r := newRig(t, time.Hour)
	conn := r.pod("*", egress.DNS{})
	r.server.Drain()
	client := egress.NewClient(conn)
	if _, err := client.Resolve(t.Context(), "127.0.0.1"); err == nil {
		t.Error("loopback is allowed")
	}
	client.Close()
	if err := <-r.served; err != nil {
		t.Errorf("Serve = %v", err)
	}
}

func TestInvalidOrders(t *testing.T) {
	r := newRig(t, time.Hour)
	for _, o := range []egress.Order{{Rules: "bad rule"}, {Rules: "*"}} { // a regular file is no connection
		if err := r.order(o, os.Stdin, os.Stdin); !errdefs.IsInvalidArgument(err) {
			t.Errorf("order %+v = %v, want ErrInvalidArgument", o, err)
		}
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.path})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := fdpass.Write(conn, egress.MaxOrder, []byte("junk"), nil); err != nil {
		t.Fatal(err)
	}
	frames := fdpass.NewReader(conn, egress.MaxOrder)
	defer frames.Close()
	f, err := frames.Next()
	var reply egress.OrderReply
	if err != nil || json.Unmarshal(f.Payload, &reply) != nil || reply.Error == nil {
		t.Errorf("reply to junk: %s, %v", f.Payload, err)
	}
}

// TestJunkEndsEgress: a worker that sends something else than requests loses the connection.
func TestJunkEndsEgress(t *testing.T) {
	r := newRig(t, time.Hour)
	conn := r.pod("*", egress.DNS{})
	if err := fdpass.Write(conn, egress.MaxMessage, []byte("junk"), nil); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read = %d, %v; want the end", n, err)
	}
}

// TestFilesEndEgress: a worker that passes files loses the connection, also if it announces none.
func TestFilesEndEgress(t *testing.T) {
	r := newRig(t, time.Hour)
	for _, announced := range []byte{0, 1} {
		conn := r.pod("*", egress.DNS{})
		payload := `{"id":1,"op":"resolve","host":"10.0.0.1"}`
		frame := append([]byte{0, 0, 0, byte(len(payload)), 0, 0, 0, announced}, payload...)
		if _, _, err := conn.WriteMsgUnix(frame, unix.UnixRights(0), nil); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := conn.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d files announced: Read = %d, %v; want the end", announced, n, err)
		}
	}
}

// TestUnreadRepliesAreBounded: a worker that reads no replies loses the connection, before they pile up.
func TestUnreadRepliesAreBounded(t *testing.T) {
	r := newRig(t, time.Hour)
	conn := r.pod("*", egress.DNS{})
	before, most := runtime.NumGoroutine(), 0
	_ = conn.SetWriteDeadline(time.Now().Add(8 * time.Second)) // less than replyTime
	var err error
	for id := uint64(0); err == nil && id < 50_000; id++ {
		err = fdpass.Write(conn, egress.MaxMessage, fmt.Appendf(nil, `{"id":%d,"op":"resolve","host":"127.0.0.1"}`, id), nil)
		most = max(most, runtime.NumGoroutine()-before)
	}
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write = %v, want the end", err)
	}
	if most > egress.MaxPending+10 {
		t.Errorf("%d goroutines, want at most one for each of %d requests", most, egress.MaxPending)
	}
}

// TestRequestsAreBounded: a worker that sends too many requests without waiting loses the connection, and cancels work.
func TestRequestsAreBounded(t *testing.T) {
	r := newRig(t, time.Hour)
	silent, err := net.ListenPacket("udp", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	conn := r.pod("*", egress.DNS{Servers: []string{"127.0.0.1"}})
	send := func(q egress.Request) {
		t.Helper()
		payload, err := json.Marshal(q)
		if err == nil {
			err = fdpass.Write(conn, egress.MaxMessage, payload, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for id := range uint64(egress.MaxPending) {
		send(egress.Request{ID: id, Op: egress.OpResolve, Host: "slow.example"})
	}
	frames := fdpass.NewReader(conn, egress.MaxMessage)
	defer frames.Close()
	next := func() (reply egress.Reply) {
		t.Helper()
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		f, err := frames.Next()
		if err == nil {
			err = json.Unmarshal(f.Payload, &reply)
		}
		if err != nil {
			t.Fatal(err)
		}
		return reply
	}
	send(egress.Request{ID: 3, Op: egress.OpCancel})
	if reply := next(); reply.ID != 3 || reply.Error == nil {
		t.Errorf("reply %+v to a cancelled request", reply)
	}
	send(egress.Request{ID: egress.MaxPending, Op: egress.OpResolve, Host: "10.0.0.1"})
	if reply := next(); reply.ID != egress.MaxPending || reply.Error != nil {
		t.Errorf("reply %+v to a request after a cancelled one", reply)
	}
	send(egress.Request{ID: 3, Op: egress.OpResolve, Host: "slow.example"})
	send(egress.Request{ID: egress.MaxPending + 1, Op: egress.OpResolve, Host: "slow.example"})
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if f, err := frames.Next(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reply %s, %v to more than %d requests; want the end", f.Payload, err, egress.MaxPending)
	}
}

// TestRequestsThatTimeOutTogether: a guest whose requests end together can send as many again at once.
func TestRequestsThatTimeOutTogether(t *testing.T) {
	r := newRig(t, time.Hour)
	silent, err := net.ListenPacket("udp", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	client := egress.NewClient(r.pod("*", egress.DNS{Servers: []string{"127.0.0.1"}}))
	defer client.Close()
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		var all sync.WaitGroup
		for range egress.MaxPending {
			all.Go(func() {
				if _, err := client.Resolve(ctx, "10.0.0.1"); err != nil && ctx.Err() == nil {
					t.Errorf("Resolve(10.0.0.1) = %v", err)
				}
				if _, err := client.Resolve(ctx, "slow.example"); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Resolve(slow.example) = %v, want %v", err, context.DeadlineExceeded)
				}
			})
		}
		all.Wait()
		cancel()
	}
}

// TestLookupsAreLimited: a guest that resolves names in a loop is slowed down, and its neighbour is not.
func TestLookupsAreLimited(t *testing.T) {
	r := newRig(t, time.Hour)
	dns := egress.DNS{} // without servers, lookups fail at once, but count
	loop, neighbour := egress.NewClient(r.pod("*", dns)), egress.NewClient(r.pod("*", dns))
	defer loop.Close()
	defer neighbour.Close()
	var n atomic.Int64
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	began := time.Now()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for ctx.Err() == nil {
				if _, err := loop.Resolve(ctx, fmt.Sprintf("n%d.example", n.Load())); ctx.Err() == nil && err != nil {
					n.Add(1)
				}
			}
		})
	}
	// The loop ends only after the neighbour's lookup.
	if _, err := neighbour.Resolve(ctx, "x.example"); err == nil || ctx.Err() != nil {
		t.Errorf("the neighbour waited %s: %v", time.Since(began), err)
	}
	// So many that without a limit they would come within the first second, for which most allows fewer.
	until.Within(t, 30*time.Second, "the loop has used up its burst", func() bool { return n.Load() >= lookupBurst+2*lookupRate })
	cancel()
	all.Wait()
	most := lookupBurst + lookupRate*int64(time.Since(began)/time.Second+1)
	if n.Load() > most || n.Load() < lookupBurst {
		t.Errorf("%d lookups in %s, want %d to %d", n.Load(), time.Since(began), lookupBurst, most)
	}
}

// TestOnlyAllowedNamesAreAsked: of the names that a name can stand for, the name server is asked only for those that the
// rules allow.
func TestOnlyAllowedNamesAreAsked(t *testing.T) {
	r := newRig(t, time.Hour)
	var mu sync.Mutex
	asked := map[string]bool{}
	serveNames(t, func(name string) {
		mu.Lock()
		defer mu.Unlock()
		asked[name] = true
	})
	dns := egress.DNS{Servers: []string{"127.0.0.1"}, Searches: []string{"svc.cluster.local", "cluster.local"}, Options: []string{"ndots:5"}}
	for _, c := range []struct {
		rules, host, asked string
		code               egress.Code
	}{
		{"*.svc.cluster.local:443", "secret.attacker.example", "secret.attacker.example.svc.cluster.local.", egress.CodeNotFound},
		{"*.svc.cluster.local:443", "secret.attacker.example.", "", egress.CodeDenied},
		{"db.svc.cluster.local", "db", "db.svc.cluster.local.", egress.CodeNotFound},
		{"db.example.com", "db.example.com.", "db.example.com.", egress.CodeNotFound},
		{"db", "db", "db. db.cluster.local. db.svc.cluster.local.", egress.CodeNotFound},
		{"*.other.example", "db", "", egress.CodeDenied},
		{"10.0.0.0/8", "db.", "db.", egress.CodeNotFound},
	} {
		client := egress.NewClient(r.pod(c.rules, dns))
		_, err := client.Resolve(t.Context(), c.host)
		client.Close()
		mu.Lock()
		got := strings.Join(slices.Sorted(maps.Keys(asked)), " ")
		clear(asked)
		mu.Unlock()
		if e, ok := errors.AsType[*egress.Error](err); got != c.asked || !ok || e.Code != c.code {
			t.Errorf("%s: Resolve(%s) asked for %q and returned %v; want %q and %s", c.rules, c.host, got, err, c.asked, c.code)
		}
	}
}

// serveNames runs a name server that knows no name, and reports the names that it is asked for.
func serveNames(t *testing.T, report func(name string)) {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			report(m.Questions[0].Name.String())
			m.Response, m.RCode, m.Additionals = true, dnsmessage.RCodeNameError, nil
			if reply, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	}()
}

func TestCandidates(t *testing.T) {
	r := newResolver(egress.DNS{Servers: []string{"10.0.0.1", "junk", "::1"}, Searches: []string{"a.test.", "b.test"},
		Options: []string{"ndots:2", "timeout:99", "attempts:x"}}, nil)
	if len(r.servers) != 2 || r.timeout != maxTimeout || r.attempts != defaultAttempts {
		t.Errorf("newResolver = %+v", r)
	}
	for host, want := range map[string]string{"db": "[db.a.test db.b.test db]", "DB.": "[db]", "x.y.z": "[x.y.z x.y.z.a.test x.y.z.b.test]"} {
		if got, err := r.candidates(host); fmt.Sprint(got) != want || err != nil {
			t.Errorf("candidates(%s) = %v, %v; want %s", host, got, err, want)
		}
	}
	if _, err := r.candidates(""); err == nil {
		t.Error("candidates of no name")
	}
	if !isLocalhost("localhost") || !isLocalhost("a.localhost") || isLocalhost("mylocalhost") {
		t.Error("isLocalhost is wrong")
	}
}

func TestConnectErrors(t *testing.T) {
	to := netip.MustParseAddrPort("192.0.2.1:1")
	for err, want := range map[error]egress.Code{
		errdefs.ErrUnavailable: egress.CodeRefused, unix.EHOSTUNREACH: egress.CodeUnroutable,
		context.DeadlineExceeded: egress.CodeTimeout, unix.EPERM: egress.CodeProhibited, unix.EMFILE: egress.CodeLimit,
	} {
		if got := connectError(to, fmt.Errorf("x: %w", err)).Code; got != want {
			t.Errorf("connectError(%v) = %s, want %s", err, got, want)
		}
	}
}
