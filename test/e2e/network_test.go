package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const itWorks = "It works!"

// httpd returns a web server on port 80, which logs a line once it is ready.
func httpd(name string) *runtimeapi.ContainerConfig {
	return harness.ContainerConfig(name, harness.Httpd)
}

func ports(m ...*runtimeapi.PortMapping) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.PortMappings = m }
}

// nodeAddress returns an address of the node other than loopback. It stays on the loopback interface until the
// namespaces of the test end.
func nodeAddress(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	link, err := net.InterfaceByName(d.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := link.Addrs()
	if err != nil || len(addrs) == 0 {
		t.Fatalf("addresses of the bridge: got %v, error %v", addrs, err)
	}
	prefix, err := netip.ParsePrefix(addrs[0].String())
	if err != nil {
		t.Fatal(err)
	}
	return prefix.Addr().String()
}

// listenInside opens a socket in the network namespace of a pod.
func listenInside(t *testing.T, d *harness.Daemon, p *harness.Pod, network, address string) net.PacketConn {
	t.Helper()
	type result struct {
		conn net.PacketConn
		err  error
	}
	done := make(chan result)
	var listen func()
	listen = func() {
		runtime.LockOSThread()              // no unlock: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() { // the main thread cannot end, and its namespaces count as the process's
			begun := make(chan struct{})
			go func() { close(begun); listen() }() // on another thread, because this goroutine occupies the main thread
			<-begun
			runtime.UnlockOSThread()
			return
		}
		ns, err := os.Open(filepath.Join(d.State, "netns", p.ID))
		if err == nil {
			defer ns.Close()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err != nil {
			done <- result{err: err}
			return
		}
		conn, err := net.ListenPacket(network, address)
		done <- result{conn, err}
	}
	go listen()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { r.conn.Close() })
	return r.conn
}

func TestNetworking(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	d.Pull(t, harness.Httpd)
	t.Run("runtime should support DNS config [Conformance]", func(t *testing.T) {
		p := startPod(t, d, func(c *runtimeapi.PodSandboxConfig) {
			c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.10.10.10", "fd00::10"}, Searches: []string{"google.com", "svc.cluster.local"},
				Options: []string{"ndots:8", "edns0"}}
		})
		want := "search google.com svc.cluster.local\nnameserver 10.10.10.10\nnameserver fd00::10\noptions ndots:8 edns0\n"
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if got := c.Must("cat", "/etc/resolv.conf"); got != want {
			t.Errorf("/etc/resolv.conf: got %q, want %q", got, want)
		}
	})
	t.Run("C1 a DNS config that would break out of its line is refused", func(t *testing.T) {
		for _, dns := range []*runtimeapi.DNSConfig{
			{Servers: []string{"1.1.1.1\nnameserver 6.6.6.6"}}, {Searches: []string{"a\nb"}}, {Options: []string{"ndots:1\nx"}},
		} {
			config := harness.PodConfig(t, "p")
			config.DnsConfig = dns
			_, err := d.CRI().RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: config})
			wantCode(t, err, codes.InvalidArgument)
		}
	})
	t.Run("runtime should support set hostname [Conformance]", func(t *testing.T) {
		p := startPod(t, d, func(c *runtimeapi.PodSandboxConfig) { c.Hostname = "critest-host" })
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if got := c.Must("sh", "-c", "hostname; cat /etc/hostname; echo $HOSTNAME"); got != strings.Repeat("critest-host\n", 3) {
			t.Errorf("host names: got %q, want critest-host three times", got)
		}
		if got := c.Must("cat", "/etc/hosts"); !strings.Contains(got, p.IP()+"\tcritest-host\n") ||
			!strings.Contains(got, "127.0.0.1\tlocalhost\n") {
			t.Errorf("/etc/hosts: got %q, want the pod's name and localhost", got)
		}
	})
	t.Run("the kubelet's /etc/hosts goes before ours", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "hosts")
		if err := os.WriteFile(file, []byte("# the kubelet's\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		c := sleeper(t, d, mounts(&runtimeapi.Mount{HostPath: file, ContainerPath: "/etc/hosts"}))
		if got := c.Must("cat", "/etc/hosts"); got != "# the kubelet's\n" {
			t.Errorf("/etc/hosts: got %q, want the kubelet's file", got)
		}
	})
	t.Run("host network has the node's name, files and addresses", func(t *testing.T) {
		name, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		p := startPod(t, d, harness.HostNetwork())
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), harness.Security(func(s *security) {
			s.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
		})))
		if got := strings.TrimSpace(c.Must("hostname")); got != name {
			t.Errorf("host name: got %q, want %q", got, name)
		}
		if got := c.Must("ip", "-o", "link"); !strings.Contains(got, d.Bridge) {
			t.Errorf("links: got %s, want %s among them", got, d.Bridge)
		}
	})
	t.Run("pods reach each other and the node, and the node them", func(t *testing.T) {
		one, two := startPod(t, d), startPod(t, d)
		one.Run(httpd("web"))
		c := two.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if got := get(t, "http://"+one.IP()); !strings.Contains(got, itWorks) {
			t.Errorf("page from the node: got %q, want %q in it", got, itWorks)
		}
		if got := c.Must("wget", "-q", "-O-", "http://"+one.IP()); !strings.Contains(got, itWorks) {
			t.Errorf("page from a pod: got %q, want %q in it", got, itWorks)
		}
		l, err := net.Listen("tcp", "0.0.0.0:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c.Must("nc", "-w", "5", nodeAddress(t, d), fmt.Sprint(l.Addr().(*net.TCPAddr).Port), "-e", "true")
		if one.IP() == two.IP() {
			t.Errorf("addresses of two pods: both are %s", one.IP())
		}
	})
	t.Run("runtime should support port mapping with only container port [Conformance]", func(t *testing.T) {
		p := startPod(t, d, ports(&runtimeapi.PortMapping{ContainerPort: 80}))
		p.Run(httpd("web"))
		if got := get(t, "http://"+p.IP()+":80"); !strings.Contains(got, itWorks) {
			t.Errorf("page: got %q, want %q in it", got, itWorks)
		}
	})
	t.Run("runtime should support port mapping with host port and container port [Conformance]", func(t *testing.T) {
		p := startPod(t, d, ports(&runtimeapi.PortMapping{HostPort: 12000, ContainerPort: 80}))
		p.Run(httpd("web"))
		for _, host := range []string{"127.0.0.1", nodeAddress(t, d)} {
			if got := get(t, "http://"+host+":12000"); !strings.Contains(got, itWorks) {
				t.Errorf("page by %s: got %q, want %q in it", host, got, itWorks)
			}
		}
	})
	t.Run("a host port at one address of the node, freed with its pod", func(t *testing.T) {
		for range 2 {
			p := d.RunPod(t, harness.PodConfig(t, "p", ports(&runtimeapi.PortMapping{HostIp: "127.0.0.1", HostPort: 12001, ContainerPort: 80})))
			p.Run(httpd("web"))
			if got := get(t, "http://127.0.0.1:12001"); !strings.Contains(got, itWorks) {
				t.Errorf("page: got %q, want %q in it", got, itWorks)
			}
			if conn, err := net.Dial("tcp", nodeAddress(t, d)+":12001"); err == nil {
				conn.Close()
				t.Error("connection to the port at another address succeeded, want an error")
			}
			p.Remove()
		}
		if conn, err := net.Dial("tcp", "127.0.0.1:12001"); err == nil {
			conn.Close()
			t.Error("connection to the port of a removed pod succeeded, want an error")
		}
	})
	t.Run("a host port of UDP", func(t *testing.T) {
		p := startPod(t, d, ports(&runtimeapi.PortMapping{Protocol: runtimeapi.Protocol_UDP, HostPort: 12002, ContainerPort: 5353}))
		pc := listenInside(t, d, p, "udp", ":5353")
		conn, err := net.Dial("udp", nodeAddress(t, d)+":12002")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte("over UDP")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		if err := pc.SetReadDeadline(time.Now().Add(waitLimit)); err != nil {
			t.Fatal(err)
		}
		if n, _, err := pc.ReadFrom(buf); err != nil || string(buf[:n]) != "over UDP" {
			t.Errorf("datagram: got %q, error %v; want \"over UDP\"", buf[:n], err)
		}
	})
	t.Run("addresses are given back", func(t *testing.T) {
		seen := map[string]bool{}
		for range 3 {
			p := d.RunPod(t, harness.PodConfig(t, "p"))
			seen[p.IP()] = true
			p.Stop()
			if ip := p.Status().GetNetwork().GetIp(); ip != "" {
				t.Errorf("address of a stopped pod: got %s, want none", ip)
			}
			p.Remove()
		}
	})
}

func TestDualStack(t *testing.T) {
	d := harness.StartDaemon(t, harness.Set("network.default.subnet_v6", "fd00:64::/64"))
	d.Pull(t, harness.Httpd)
	p := startPod(t, d, ports(&runtimeapi.PortMapping{HostPort: 12004, ContainerPort: 80}))
	c := p.Run(httpd("web"))
	network := p.Status().GetNetwork()
	if len(network.AdditionalIps) != 1 {
		t.Fatalf("addresses: got %v, want two", network)
	}
	four, six := netip.MustParseAddr(network.Ip), netip.MustParseAddr(network.AdditionalIps[0].Ip)
	if !four.Is4() || !six.Is6() {
		t.Errorf("addresses %s and %s, want IPv4 first and IPv6 second", four, six)
	}
	t.Run("both addresses are the pod's", func(t *testing.T) {
		got := c.Must("ip", "-o", "addr", "show", "eth0")
		for _, ip := range []netip.Addr{four, six} {
			if !strings.Contains(got, ip.String()+"/") {
				t.Errorf("addresses in the container: got %s, want %s among them", got, ip)
			}
		}
	})
	for name, url := range map[string]string{
		"IPv4": "http://" + four.String(), "IPv6": "http://[" + six.String() + "]", "host port over IPv4": "http://127.0.0.1:12004",
	} {
		t.Run(name, func(t *testing.T) {
			if got := get(t, url); !strings.Contains(got, itWorks) {
				t.Errorf("page: got %q, want %q in it", got, itWorks)
			}
		})
	}
}

func TestMultipleContainers(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	d.Pull(t, harness.Httpd)
	p := startPod(t, d)
	web, other := p.Run(httpd("web")),
		p.Run(harness.ContainerConfig("other", harness.Busybox, harness.Shell("echo from the other; trap 'exit 0' TERM; sleep 3600 & wait")))
	t.Run("should support network", func(t *testing.T) {
		if got := get(t, "http://"+p.IP()); !strings.Contains(got, itWorks) {
			t.Errorf("page: got %q, want %q in it", got, itWorks)
		}
		if got := other.Must("wget", "-q", "-O-", "http://localhost:80"); !strings.Contains(got, itWorks) {
			t.Errorf("page from the other container: got %q, want %q in it", got, itWorks)
		}
	})
	t.Run("should support container log", func(t *testing.T) {
		web.WaitLog("listening on port 80")
		other.WaitLog("from the other")
	})
	t.Run("should support container exec", func(t *testing.T) {
		for _, c := range []*harness.Container{web, other} {
			if got := c.Must("echo", "-n", "hello"); got != "hello" {
				t.Errorf("output: got %q, want hello", got)
			}
		}
	})
}
