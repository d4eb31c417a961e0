package e2e

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/libvirtdtest"
)

// TestVMScreen: port-forward to port 5900 reaches the VNC server of a machine with the annotation, and the guest's own
// port of a machine without it.
func TestVMScreen(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	wantScreen(t, d)
	c := d.RunVM(t, &harness.PodSpec{Name: "without", Image: harness.Guest})
	c.WaitGuest()
	waitAgent(t, d, c)
	c.Must("sh", "-c", "mkdir /tmp/www && echo the port of the guest >/tmp/www/index.html && httpd -p 5900 -h /tmp/www")
	if page := get(t, "http://"+c.Pod.Forward(t, 5900)+"/index.html"); !strings.Contains(page, "the port of the guest") {
		t.Errorf("page at port 5900 of a machine without VNC: got %q, want that of the guest", page)
	}
}

// TestVMScreenLibvirt is the same with libvirt, for a machine with the annotation.
func TestVMScreenLibvirt(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := tinyVM(t, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill)
	wantScreen(t, d)
}

// wantScreen runs a machine with VNC, and checks that port-forward leads to a VNC server.
func wantScreen(t *testing.T, d *harness.Daemon) {
	t.Helper()
	c := d.RunVM(t, &harness.PodSpec{Name: "screen", Image: harness.TinyGuest,
		Pod: []harness.PodOption{annotated("tripod.dev/vm.vnc", "true")}})
	conn, err := net.DialTimeout("tcp", c.Pod.Forward(t, 5900), 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	const want = "RFB 003.008\n"
	hello := make([]byte, len(want))
	if n, err := io.ReadFull(conn, hello); err != nil || string(hello) != want {
		t.Errorf("greeting at port 5900: got %q, %v; want %q", hello[:n], err, want)
	}
}
