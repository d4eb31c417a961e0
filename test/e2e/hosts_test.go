package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// These tests are about what is on a pod's host: its resolver, its ports and its uplink.

// upstreamServer is the name server that the test's systemd-resolved asks.
const upstreamServer = "192.0.2.53"

const stubResolvConf = "# of systemd-resolved\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch lan\n"

// resolvedHost makes the test's host one with systemd-resolved.
func resolvedHost(t *testing.T) {
	t.Helper()
	file, upstream := filepath.Join(t.TempDir(), "resolv.conf"), "/run/systemd/resolve/resolv.conf"
	err := os.WriteFile(file, []byte(stubResolvConf), 0o644)
	if err == nil {
		err = unix.Mount(file, "/etc/resolv.conf", "", unix.MS_BIND, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/etc/resolv.conf", 0); err != nil {
			t.Error(err)
		}
		os.RemoveAll(filepath.Dir(upstream))
	})
	if err := os.MkdirAll(filepath.Dir(upstream), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(upstream, []byte("nameserver "+upstreamServer+"\nsearch lan\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestStubResolver: pods get name servers that they can reach, and pods on the host network get the node's file.
func TestStubResolver(t *testing.T) {
	resolvedHost(t)
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	if got, want := sleeper(t, d).Must("cat", "/etc/resolv.conf"), "search lan\nnameserver "+upstreamServer+"\noptions edns0\n"; got != want {
		t.Errorf("/etc/resolv.conf: got %q, want %q", got, want)
	}
	p := startPod(t, d, harness.HostNetwork())
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), harness.Security(func(s *security) {
		s.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
	})))
	if got := c.Must("cat", "/etc/resolv.conf"); got != stubResolvConf {
		t.Errorf("/etc/resolv.conf on the host network: got %q, want the node's", got)
	}
}

// TestWasmStubResolver: a component's names are resolved by a name server that it can reach.
func TestWasmStubResolver(t *testing.T) {
	resolvedHost(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	server := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(upstreamServer), Mask: net.CIDRMask(32, 32)}}
	if err := netlink.AddrAdd(lo, server); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.AddrDel(lo, server) })
	names, err := net.ListenPacket("udp", upstreamServer+":53")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { names.Close() })
	asked := make(chan string, 100)
	go func() {
		for buf := make([]byte, 512); ; {
			n, from, err := names.ReadFrom(buf)
			if err != nil {
				return
			}
			asked <- string(buf[:n])
			buf[2], buf[3] = buf[2]|0x80, 3 // an answer: the name does not exist
			_, _ = names.WriteTo(buf[:n], from)
		}
	}()
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	f := startFetcher(t, d)
	if got := f.fetch(f.Pod.IP(), "http://asked.test/"); got != "502 DNS-error" {
		t.Errorf("answer: got %q, want DNS-error", got)
	}
	select {
	case q := <-asked:
		if !strings.Contains(q, "\x05asked\x04test") {
			t.Errorf("question to the name server: got %q, want asked.test", q)
		}
	default:
		t.Errorf("no question to %s", upstreamServer)
	}
}

// TestHostPortTaken: a host port that a pod or a process has is refused by name, and free once its pod has stopped.
func TestHostPortTaken(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	mapping := func(port int32) harness.PodOption {
		return ports(&runtimeapi.PortMapping{HostPort: port, ContainerPort: 80})
	}
	refused := func(holder string, opts ...harness.PodOption) {
		t.Helper()
		_, err := d.CRI().RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "late", opts...)})
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), holder) {
			t.Errorf("got error %v, want FailedPrecondition that names %s", err, holder)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := int32(l.Addr().(*net.TCPAddr).Port)
	refused("process e2e.test (PID ", mapping(port))
	l.Close()

	first := d.RunPod(t, harness.PodConfig(t, "first", mapping(port)))
	refused(first.ID, mapping(port))
	refused(first.ID, harness.HostNetwork(), ports(&runtimeapi.PortMapping{ContainerPort: port}))
	typed := newForeground(t, d, "typed", []string{"-d", "-p", fmt.Sprintf("%d:80", port)}, harness.Busybox, "sleep", "60")
	if err := typed.Run(); err == nil || !strings.Contains(typed.stderr.String(), first.ID) {
		t.Errorf("tripod run: got error %v, %q; want one that names %s", err, typed.stderr, first.ID)
	}
	r := manifestRun{t, d, t.TempDir()}
	manifest := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: typed}\nspec: {containers: [{name: c, image: %s, ports: [{containerPort: 80, hostPort: %d}]}]}\n", harness.Busybox, port)
	if _, stderr, code := r.run(manifest); code == 0 || !strings.Contains(stderr, first.ID) {
		t.Errorf("tripod run -f: got exit code %d, %q; want an error that names %s", code, stderr, first.ID)
	}
	if pods, err := d.Runtime().ListPodSandbox(t.Context(), nil); err != nil || len(pods) != 1 {
		t.Errorf("pods after refused ones: got %v, %v; want the first", pods, err)
	}
	d.Restart()
	refused(first.ID, mapping(port))
	first.Stop()
	startPod(t, d, mapping(port))
}

// TestVMOnItsHost: a machine gets the name servers that it can reach, and the uplink's MTU.
func TestVMOnItsHost(t *testing.T) {
	resolvedHost(t)
	uplink := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink", MTU: 1400, Flags: net.FlagUp}, PeerName: "uplinkp"}
	if err := netlink.LinkAdd(uplink); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(uplink) })
	_, everywhere, _ := net.ParseCIDR("0.0.0.0/0")
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: uplink.Index, Dst: everywhere, Scope: netlink.SCOPE_LINK}); err != nil {
		t.Fatal(err)
	}
	d := harness.StartDaemon(t, harness.VM(t))
	m := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	m.WaitGuest()
	waitAgent(t, d, m)
	if got := m.Must("cat", "/sys/class/net/eth0/mtu"); strings.TrimSpace(got) != "1400" {
		t.Errorf("MTU of the machine: got %q, want the uplink's 1400", got)
	}
	if got := m.Must("cat", "/etc/resolv.conf"); !strings.Contains(got, "nameserver "+upstreamServer) || strings.Contains(got, "127.0.0.53") {
		t.Errorf("/etc/resolv.conf of the machine: got %q, want nameserver %s", got, upstreamServer)
	}
}
