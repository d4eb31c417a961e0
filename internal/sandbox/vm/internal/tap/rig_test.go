package tap_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/test/accept"
	"github.com/tripod-run/tripod/test/until"
)

// node is a network manager on the test host, with its own bridge and subnets.
type node struct {
	*network.Manager
	t   testing.TB
	dir string
}

var nodes atomic.Int64

// newNode makes a node with the default chain for both families. A configuration, if not empty, is a conflist that
// replaces the default chain; %d in it stands for the node's number.
func newNode(t testing.TB, configuration string, change ...func(*network.Config)) *node {
	t.Helper()
	number := nodes.Add(1)
	n := &node{t: t, dir: t.TempDir()}
	cfg := network.Config{
		ConfDir: filepath.Join(n.dir, "net.d"), CacheDir: filepath.Join(n.dir, "cni"), NetnsDir: filepath.Join(n.dir, "netns"),
		IsBackendLink: tap.IsTap, Logger: slog.New(slog.DiscardHandler),
		Default: network.DefaultNetwork{
			Bridge: fmt.Sprintf("tap-br%d", number), SubnetV4: fmt.Sprintf("10.99.%d.0/24", number), SubnetV6: fmt.Sprintf("fd99:%x::/64", number),
		},
	}
	for _, c := range change {
		c(&cfg)
	}
	if err := os.Mkdir(cfg.ConfDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if configuration != "" {
		configuration = strings.ReplaceAll(configuration, "%d", fmt.Sprint(number))
		if err := os.WriteFile(filepath.Join(cfg.ConfDir, "10.conflist"), []byte(configuration), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := network.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n.Manager = m
	t.Cleanup(func() {
		_ = m.Close()
		_ = unix.Unmount(cfg.NetnsDir, unix.MNT_DETACH)
		if bridge, err := netlink.LinkByName(cfg.Default.Bridge); err == nil {
			_ = netlink.LinkDel(bridge)
		}
	})
	return n
}

// pod sets up a pod's network until the end of the test.
func (n *node) pod(id string, ports ...network.PortMapping) *network.Result {
	n.t.Helper()
	r, err := n.Setup(n.t.Context(), network.Attachment{ID: id, PortMappings: ports})
	if err != nil {
		n.t.Fatal(err)
	}
	eventually(n.t, 10*time.Second, "bridge address is usable",
		func() bool { return n.must("", "ip", "-o", "addr", "show", "tentative") == "" })
	n.t.Cleanup(func() {
		if err := n.Teardown(context.Background(), network.Attachment{ID: id}); err != nil {
			n.t.Error(err)
		}
	})
	return r
}

func (n *node) record(id string) string { return filepath.Join(n.dir, id+".json") }

func (n *node) wire(id string) []tap.Interface {
	n.t.Helper()
	all, err := tap.Wire(n.t.Context(), n.Netns(id), tap.Options{Record: n.record(id), UID: 4242, GID: 4243})
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

func (n *node) unwire(id string) {
	n.t.Helper()
	if err := tap.Unwire(n.t.Context(), n.Netns(id), n.record(id)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) serve(id string, interfaces []tap.Interface) *tap.Responder {
	n.t.Helper()
	r, err := tap.Serve(n.t.Context(), n.Netns(id), interfaces, tap.Config{
		Servers: []string{"10.96.0.10", "fd96::a"}, Searches: []string{"ns.svc.cluster.local", "svc.cluster.local"}, Hostname: "guest",
		Logger: slog.New(slog.NewTextHandler(testWriter{n.t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := r.Close(); err != nil {
			n.t.Error(err)
		}
	})
	return r
}

// guest acts as a machine: a namespace with its own IP stack, whose Ethernet interfaces eth0, eth1 … are connected to
// the pod's taps as a hypervisor would do it, with offloads.
type guest struct {
	n     *node
	netns string
}

func (n *node) guest(id string, interfaces []tap.Interface) *guest {
	n.t.Helper()
	netns, err := n.NewNetns(n.t.Context(), "guest-"+id)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = n.RemoveNetns(context.Background(), "guest-"+id) })
	g := &guest{n, netns}
	for number, i := range interfaces {
		backend, err := tap.Open(n.t.Context(), n.Netns(id), i.Tap)
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() { backend.Close() })
		mac, err := net.ParseMAC(i.MAC)
		if err != nil {
			n.t.Fatal(err)
		}
		nic := g.nic(fmt.Sprintf("eth%d", number), mac, i.MTU)
		offload(n.t, backend)
		offload(n.t, nic)
		// A tap drops outgoing frames until the kernel has noticed that it is open.
		eventually(n.t, 10*time.Second, "tap is up", func() bool {
			return strings.Contains(n.must(n.Netns(id), "ip", "-br", "link", "show", "dev", i.Tap), " UP ")
		})
		go pump(backend, nic)
		go pump(nic, backend)
	}
	return g
}

// nic makes an interface in the guest and returns its other end.
func (g *guest) nic(name string, mac net.HardwareAddr, mtu int) *os.File {
	g.n.t.Helper()
	var file *os.File
	g.inside(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		ifr, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
			return err
		}
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		conf := "/proc/sys/net/ipv6/conf/" + name + "/"
		for file, value := range map[string]string{"accept_ra": "2", "router_solicitation_delay": "0", "router_solicitation_interval": "1"} {
			if err := os.WriteFile(conf+file, []byte(value), 0); err != nil {
				return err
			}
		}
		file = os.NewFile(uintptr(fd), name)
		for _, err := range []error{netlink.LinkSetHardwareAddr(link, mac), netlink.LinkSetMTU(link, mtu), netlink.LinkSetUp(link)} {
			if err != nil {
				return err
			}
		}
		return nil
	})
	g.n.t.Cleanup(func() { file.Close() })
	return file
}

// offload enables checksum and segmentation offloading, as virtio-net does.
func offload(t testing.TB, f *os.File) {
	t.Helper()
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		err = unix.IoctlSetInt(int(fd), unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// pump copies frames until an end is closed. A frame that the other end cannot take is lost.
func pump(from, to *os.File) {
	buf := make([]byte, 70000)
	for {
		count, err := from.Read(buf)
		if err != nil {
			return
		}
		_, _ = to.Write(buf[:count])
	}
}

func (g *guest) inside(fn func() error) {
	g.n.t.Helper()
	g.n.inside(g.netns, fn)
}

func (n *node) inside(netns string, fn func() error) {
	n.t.Helper()
	fd, err := netthread.Open(netns)
	if err == nil {
		defer unix.Close(fd)
		err = netthread.In(fd, fn)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// command runs a program in a namespace; "" is the host.
func (n *node) command(netns string, args ...string) (string, error) {
	if netns != "" {
		args = append([]string{"nsenter", "--net=" + netns}, args...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second) // not the test's context, because cleanups run commands too
	defer cancel()
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	return string(out), err
}

func (n *node) must(netns string, args ...string) string {
	n.t.Helper()
	out, err := n.command(netns, args...)
	if err != nil {
		n.t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return out
}

// ping sends 20 packets and expects 20 answers.
func (n *node) ping(netns, to string) {
	n.t.Helper()
	out, err := n.command(netns, "busybox", "ping", "-c", "20", "-i", "0.02", "-W", "2", "-q", to)
	if err != nil || !strings.Contains(out, "20 packets transmitted, 20 packets received") {
		n.t.Errorf("ping %s from %q: %v\n%s", to, netns, err, out)
	}
}

// static configures the guest with all addresses and routes of its interfaces.
func (g *guest) static(interfaces []tap.Interface) {
	g.n.t.Helper()
	for number, i := range interfaces {
		dev := fmt.Sprintf("eth%d", number)
		for _, a := range i.Addrs {
			g.add(a, dev)
		}
		for _, r := range i.Routes {
			// On a busy machine a router advertisement may have set the default route before.
			args := []string{"ip", "route", "replace", r.Dst.String(), "dev", dev}
			if r.Dst.Addr().Is6() {
				args = []string{"ip", "-6", "route", "replace", r.Dst.String(), "dev", dev}
			}
			if r.GW.IsValid() {
				args = append(args, "via", r.GW.String(), "onlink")
			}
			g.n.must(g.netns, args...)
		}
	}
}

// add adds an address to an interface, and waits until the kernel, which works in the background, has made it local.
func (g *guest) add(a netip.Prefix, dev string) {
	g.n.t.Helper()
	family := map[bool]string{true: "-4", false: "-6"}[a.Addr().Is4()]
	g.n.must(g.netns, "ip", "addr", "add", a.String(), "dev", dev, "nodad")
	eventually(g.n.t, 10*time.Second, "address is local", func() bool {
		return strings.Contains(g.n.must(g.netns, "ip", family, "route", "show", "table", "local"), "local "+a.Addr().String()+" ")
	})
}

// listener calls body for each connection to addr in the namespace.
func (n *node) listener(netns, addr string, body func(io.Writer)) {
	n.t.Helper()
	file, err := n.Listen(n.t.Context(), netns, "tcp", addr)
	if err != nil {
		n.t.Fatal(err)
	}
	listener, err := net.FileListener(file)
	_ = file.Close()
	if err != nil {
		n.t.Fatal(err)
	}
	accept.Each(n.t, listener, func(conn net.Conn) { body(conn) })
}

// fetch reads from addr until the peer closes, and returns the number of bytes.
func (n *node) fetch(netns, addr string) int64 {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 60*time.Second)
	defer cancel()
	conn, err := n.Dial(ctx, netns, "tcp", addr)
	if err != nil {
		n.t.Fatalf("dial %[2]s from %[1]q: %[3]v", netns, addr, err)
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(60 * time.Second))
	count, err := io.Copy(io.Discard, conn)
	if err != nil {
		n.t.Fatalf("read from %[2]s in %[1]q, after %[3]d bytes: %[4]v", netns, addr, count, err)
	}
	return count
}

func body(size int) func(io.Writer) {
	return func(w io.Writer) { _, _ = w.Write(make([]byte, size)) }
}

// eventually waits for a condition.
var eventually = until.Within

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(bytes.TrimSpace(p)))
	return len(p), nil
}

// asDaemon holds a daemonCall. With it, the test program wires and unwires that namespace instead of running tests.
const asDaemon = "TRIPOD_TAP_TEST_DAEMON"

type daemonCall struct{ Netns, Record string }

func daemon(args string) int {
	var c daemonCall
	err := json.Unmarshal([]byte(args), &c)
	if err == nil {
		_, err = tap.Wire(context.Background(), c.Netns, tap.Options{Record: c.Record, UID: 4242, GID: 4243})
	}
	if err == nil {
		err = tap.Unwire(context.Background(), c.Netns, c.Record)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// dieAt runs a daemon, which the fail point kills.
func (n *node) dieAt(id, point string) {
	n.t.Helper()
	args, err := json.Marshal(daemonCall{n.Netns(id), n.record(id)})
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.CommandContext(n.t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), asDaemon+"="+string(args), failpoint.Variable+"="+point+"=kill")
	if out, err := cmd.CombinedOutput(); err == nil || cmd.ProcessState.ExitCode() != -1 {
		n.t.Fatalf("the daemon was not killed at %s: %v\n%s", point, err, out)
	}
}
