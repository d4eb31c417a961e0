package sessions

import (
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestScreen: a machine's VNC server is reached only at its port and only if the machine has one, and only if the
// server's process belongs to the machine's user.
func TestScreen(t *testing.T) {
	d := machine.Definition{Dir: t.TempDir(), UID: os.Getuid(), VNC: true}
	if err := os.Mkdir(filepath.Join(d.Dir, machine.VNCDir), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(d.Dir, machine.VNCSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("RFB 003.008\n"))
			conn.Close()
		}
	}()
	vnc := ScreenOf(d)
	conn, err := vnc.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); err != nil || string(got) != "RFB 003.008\n" {
		t.Errorf("read from the VNC server: got %q, %v; want its greeting", got, err)
	}
	for address, want := range map[string]bool{"127.0.0.1:5900": true, "[::1]:5900": true, "127.0.0.1:5901": false} {
		if got := vnc.Serves("tcp", netip.MustParseAddrPort(address)); got != want {
			t.Errorf("serves(%s) = %t, want %t", address, got, want)
		}
	}
	if at := netip.MustParseAddrPort("127.0.0.1:5900"); vnc.Serves("udp", at) || ScreenOf(machine.Definition{}).Serves("tcp", at) {
		t.Error("serves = true for UDP or a machine without VNC, want false")
	}
	d.UID++
	if _, err := ScreenOf(d).Dial(t.Context()); !errdefs.IsPermissionDenied(err) {
		t.Errorf("dial of a server of another user: got error %v, want ErrPermissionDenied", err)
	}
}
