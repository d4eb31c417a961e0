package tap_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// patience bounds each wait for a guest, which runs without KVM on a busy host.
const patience = 120 * time.Second

// qemu starts a real machine on the pod's first tap. The machine runs script after its boot. console returns the output
// of its serial console so far.
func (n *node) qemu(id string, i tap.Interface, script string) (console func() string) {
	n.t.Helper()
	file, err := tap.Open(n.t.Context(), n.Netns(id), i.Tap)
	if err != nil {
		n.t.Fatal(err)
	}
	defer file.Close()
	guest, serial := machinetest.FindGuest(n.t, false), filepath.Join(n.t.TempDir(), "serial")
	cmd := exec.Command("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel",
		"tcg,tb-size=32",
		"-m", "128", "-kernel", guest.Kernel, "-initrd", guest.Initrd, "-append",
		fmt.Sprintf("console=ttyS0 quiet no_timer_check tripod.run=%q", script),
		"-serial", "file:"+serial, "-netdev", "tap,id=net0,fd=3", "-device", "virtio-net-pci,netdev=net0,romfile=,mac="+i.MAC)
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return func() string {
		output, _ := os.ReadFile(serial)
		return string(output)
	}
}

func within(t *testing.T, console func() string, pattern string) string {
	t.Helper()
	wanted := regexp.MustCompile(pattern)
	deadline := time.Now().Add(patience)
	for {
		output := console()
		if found := wanted.FindString(output); found != "" {
			return found
		}
		if time.Now().After(deadline) {
			t.Fatalf("the console does not show %s within %s:\n%s", pattern, patience, output)
		}
		time.Sleep(20 * time.Millisecond) // pacing of the poll
	}
}

// TestRealGuest: a Linux guest gets its network by DHCP, answers 20 of 20 pings and moves 50 MB in each direction
// between it and another pod, also behind a reflecting bridge.
func TestRealGuest(t *testing.T) {
	for name, configuration := range map[string]string{"default": "", "hairpin": hairpin} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, configuration)
			const size = 50_000_000
			pod, neighbour := n.pod("pod"), n.pod("neighbour")
			serveHTTP(n, neighbour.Netns, size)
			interfaces := n.wire("pod")
			n.serve("pod", interfaces)
			console := n.qemu("pod", interfaces[0], fmt.Sprintf("wget -q -O - http://%s/ | wc -c", neighbour.IPs[0]))
			report := within(t, console, `TRIPOD-GUEST-READY.*\n`)
			t.Log(strings.TrimSpace(report))
			if !strings.Contains(report, "host=guest ") && !strings.Contains(report, "host=tripod-guest ") ||
				!strings.Contains(report, "net=dhcp") || !strings.Contains(report, pod.IPs[0].String()+"/24") {
				t.Fatalf("the guest reports %s, want DHCP with its hostname and address", report)
			}
			within(t, console, fmt.Sprint(size))
			address := pod.IPs[0].String()
			n.ping("", address)
			n.ping(neighbour.Netns, address)
			for from, netns := range map[string]string{"node": "", "pod": neighbour.Netns} {
				began := time.Now()
				got := n.get(netns, address, fmt.Sprintf("/cgi-bin/blob?%d", size))
				if got != size {
					t.Errorf("%s got %d bytes, want %d", from, got, size)
				}
				t.Logf("%s: 50 MB by HTTP in %s", from, time.Since(began))
			}
		})
	}
}

// serveHTTP answers each request to port 80 of the namespace with size bytes.
func serveHTTP(n *node, netns string, size int) {
	file, err := n.Listen(n.t.Context(), netns, "tcp", "0.0.0.0:80")
	if err != nil {
		n.t.Fatal(err)
	}
	listener, err := net.FileListener(file)
	_ = file.Close()
	if err != nil {
		n.t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(make([]byte, size))
	})}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	n.t.Cleanup(func() {
		_ = server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			n.t.Error(err)
		}
	})
}

// get fetches a page of the guest from a namespace and returns its size.
func (n *node) get(netns, host, path string) int64 {
	n.t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return n.Dial(ctx, netns, "tcp", netip.AddrPortFrom(netip.MustParseAddr(host), 80).String())
	}}
	client := http.Client{Transport: transport, Timeout: patience}
	response, err := client.Get("http://" + host + path)
	if err != nil {
		n.t.Fatal(err)
	}
	defer response.Body.Close()
	count, err := io.Copy(io.Discard, response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		n.t.Fatalf("GET %s: %s, %d bytes, %v", path, response.Status, count, err)
	}
	return count
}
