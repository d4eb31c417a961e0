package network

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/accept"
	"github.com/tripod-run/tripod/test/until"
)

const debianPlugins = "/usr/lib/cni"

// node is a manager on the test host with its own directories. It can be restarted.
type node struct {
	*Manager
	cfg Config
	t   testing.TB
}

// newNode makes a node with its own default bridge, so that tests do not interfere with each other.
func newNode(t testing.TB, change func(*Config)) *node {
	t.Helper()
	dir := t.TempDir()
	cfg := Config{
		ConfDir:       filepath.Join(dir, "net.d"),
		BinDirs:       []string{filepath.Join(dir, "bin"), debianPlugins},
		CacheDir:      filepath.Join(dir, "cni"),
		NetnsDir:      filepath.Join(dir, "netns"),
		PluginTimeout: 20 * time.Second,
		Logger:        slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo})),
	}
	for _, d := range []string{cfg.ConfDir, cfg.BinDirs[0]} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Default.Bridge = bridgeName()
	if change != nil {
		change(&cfg)
	}
	n := &node{cfg: cfg, t: t}
	t.Cleanup(func() {
		_ = n.Close()
		for _, path := range mountsBelow(t, cfg.NetnsDir) {
			_ = unix.Unmount(path, unix.MNT_DETACH)
		}
		_ = unix.Unmount(cfg.NetnsDir, unix.MNT_DETACH)
		if link, err := netlink.LinkByName(cfg.Default.Bridge); err == nil {
			_ = netlink.LinkDel(link)
		}
	})
	n.start()
	return n
}

var bridges int

func bridgeName() string {
	bridges++
	return fmt.Sprintf("tripod%d", bridges)
}

func (n *node) start() {
	n.t.Helper()
	m, err := New(n.cfg)
	if err != nil {
		n.t.Fatal(err)
	}
	n.Manager = m
}

// restart simulates a restart of the daemon: nothing in memory survives.
func (n *node) restart() {
	n.t.Helper()
	_ = n.Close()
	n.start()
}

// configure writes a CNI configuration file and reloads the chain.
func (n *node) configure(name, content string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.cfg.ConfDir, name), []byte(content), 0o644); err != nil {
		n.t.Fatal(err)
	}
	n.reload()
}

// plugin installs a shell script as a CNI plugin.
func (n *node) plugin(name, script string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.cfg.BinDirs[0], name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) setup(a Attachment) *Result {
	n.t.Helper()
	r, err := n.Setup(n.t.Context(), a)
	if err != nil {
		n.t.Fatal(err)
	}
	return r
}

// teardown calls Teardown and waits until the release is complete.
func (n *node) teardown(a Attachment) {
	n.t.Helper()
	if err := n.Teardown(n.t.Context(), a); err != nil {
		n.t.Fatal(err)
	}
	n.awaitReleased(keyOf(a.ID))
}

func (n *node) awaitReleased(key string) {
	n.t.Helper()
	until.Holds(n.t, "the release of "+key, func() bool {
		rec, err := n.records.get(key)
		return err == nil && rec == nil
	})
}

// assertClean fails the test if anything of any pod is left once the releases under way are complete.
func (n *node) assertClean() {
	n.t.Helper()
	keys, err := n.records.keys()
	if err != nil {
		n.t.Error(err)
	}
	for _, key := range keys {
		n.awaitReleased(key)
	}
	if left := n.leases(); len(left) > 0 {
		n.t.Errorf("leases left: %v", left)
	}
	for _, dir := range []string{n.cfg.NetnsDir, n.records.dir, filepath.Join(n.cfg.CacheDir, "results")} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			n.t.Error(err)
		}
		for _, e := range entries {
			n.t.Errorf("left: %s", filepath.Join(dir, e.Name()))
		}
	}
	if left := mountsBelow(n.t, n.cfg.NetnsDir); len(left) > 0 {
		n.t.Errorf("mounts left: %v", left)
	}
	if left := n.bridgePorts(); len(left) > 0 {
		n.t.Errorf("interfaces left on the bridge: %v", left)
	}
	for _, iptables := range []string{"iptables", "ip6tables"} {
		rules, err := exec.Command(iptables, "--wait", "-t", "nat", "-S").CombinedOutput()
		if err != nil || strings.Contains(string(rules), "CNI-DN-") || strings.Contains(string(rules), " id: ") { // rules of a pod
			n.t.Errorf("%s rules left: %v\n%s", iptables, err, rules)
		}
	}
}

// leases returns the addresses that host-local has leased to pods of the default network.
func (n *node) leases() []string {
	n.t.Helper()
	entries, err := os.ReadDir(filepath.Join(n.leasesDir(), defaultNetworkName))
	if err != nil && !os.IsNotExist(err) {
		n.t.Fatal(err)
	}
	var leased []string
	for _, e := range entries {
		if _, err := netip.ParseAddr(strings.ReplaceAll(e.Name(), "_", ":")); err == nil {
			leased = append(leased, e.Name())
		}
	}
	return leased
}

func (n *node) bridgePorts() []string {
	bridge, err := netlink.LinkByName(n.cfg.Default.Bridge)
	if err != nil {
		return nil
	}
	links, err := netlink.LinkList()
	if err != nil {
		n.t.Fatal(err)
	}
	var ports []string
	for _, link := range links {
		if link.Attrs().MasterIndex == bridge.Attrs().Index {
			ports = append(ports, link.Attrs().Name)
		}
	}
	return ports
}

// serve answers TCP connections to addr inside the namespace with greeting, until the test ends.
func (n *node) serve(netns string, addr, greeting string) {
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
	accept.Each(n.t, listener, func(conn net.Conn) { _, _ = io.WriteString(conn, greeting) })
}

// ask connects to addr from inside the namespace and returns the server's greeting.
func (n *node) ask(netns, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 10*time.Second)
	defer cancel()
	conn, err := n.Dial(ctx, netns, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	greeting, err := io.ReadAll(conn)
	return string(greeting), err
}

func (n *node) mustAsk(netns, addr, want string) {
	n.t.Helper()
	if got, err := n.ask(netns, addr); err != nil || got != want {
		n.t.Errorf("greeting of %s for namespace %q = %q, %v, want %q", addr, netns, got, err, want)
	}
}

// eventually waits for a background event.
var eventually = until.Within

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(bytes.TrimSpace(p)))
	return len(p), nil
}
