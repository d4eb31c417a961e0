package harness

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Images of virtual machines (hack/images/vm.go and tiny.go). The first four run hack/images/guest.
const (
	vmPrefix     = ImagePrefix + "tripod/vm/"
	Guest        = vmPrefix + "busybox:1"       // a kernel and an initramfs
	FullGuest    = vmPrefix + "full:1"          // the same with a kernel that has virtio-9p
	DiskGuest    = vmPrefix + "disk:1"          // containerDisk: a bootable disk, with a FAT file system at /disk
	DiskArtifact = vmPrefix + "disk-artifact:1" // the same disk as an artifact
	TinyGuest    = vmPrefix + "tiny:1"          // a boot sector that ticks and obeys the power button
	TinyEnds     = vmPrefix + "tiny-ends:1"     // prints one line and powers off
	TinyDeaf     = vmPrefix + "tiny-deaf:1"     // ticks and ignores the power button
	// Images that a node must refuse.
	BackingDisk = vmPrefix + "backing:1"   // its disk names a file on the node as its backing file
	TwoDisks    = vmPrefix + "two-disks:1" // a containerDisk with two disks
)

// GuestTimeout bounds the boot of a guest, which is emulated and slow on a busy host.
const GuestTimeout = 2 * time.Minute

// VM configures small, emulated machines, and builds the programs that they need.
func VM(t testing.TB) Option {
	t.Helper()
	for name, variable := range map[string]string{"tripod-agent": "TRIPOD_AGENT_BIN", "tripod-vmwrap": "TRIPOD_VMWRAP_BIN"} {
		if os.Getenv(variable) != "" {
			continue
		}
		bin := filepath.Join(Root(), "build", "bin", name)
		if err := command("go", "build", "-ldflags", "-s -w", "-o", bin, "./cmd/"+name); err != nil {
			t.Fatal(err)
		}
		os.Setenv(variable, bin)
	}
	return func(d *Daemon) {
		set(d.config, "vm.accel", "tcg")
		set(d.config, "vm.default_memory", 128<<20)
	}
}

// handlerVariable can name OCIHandler. It is then the default handler, so that the tests of containers show what machines
// that run containers can do.
const handlerVariable = "TRIPOD_TEST_HANDLER"

// DefaultHandler returns OCIHandler if that is the default handler, otherwise "".
func DefaultHandler() string {
	if os.Getenv(handlerVariable) == OCIHandler {
		return OCIHandler
	}
	return ""
}

// OCIHandler is the handler of machines that run containers.
const OCIHandler = "vm-oci"

// VMOCI configures a node whose machines can run containers. They always boot; see VMOCITemplates.
func VMOCI(t testing.TB) Option {
	t.Helper()
	machines := VM(t)
	if _, err := os.Stat(filepath.Join(Root(), "build", "guest", "version")); err != nil {
		t.Fatalf("the guest of OCI pods is missing (make guest): %v", err)
	}
	return func(d *Daemon) {
		machines(d)
		set(d.config, "vm.guest_dir", filepath.Join(Root(), "build", "guest"))
		set(d.config, "vm.templates", 0)
	}
}

// VMOCITemplates is like VMOCI, but machines continue from templates, as on ordinary nodes.
func VMOCITemplates(t testing.TB) Option {
	t.Helper()
	machines := VMOCI(t)
	return func(d *Daemon) {
		machines(d)
		set(d.config, "vm.templates", 2)
	}
}

// VMOCIFailPoints is like VMOCI, but the guest's tripod-guest has fail points (cmd/tripod-guest/failpoints.go).
func VMOCIFailPoints(t testing.TB) Option {
	t.Helper()
	machines, guest := VMOCI(t), filepath.Join(Root(), "build", "test", "guest")
	if _, err := os.Stat(filepath.Join(guest, "version")); err != nil {
		t.Fatalf("the guest of OCI pods with fail points is missing (make guest): %v", err)
	}
	return func(d *Daemon) {
		machines(d)
		set(d.config, "vm.guest_dir", guest)
	}
}

// RunVM runs a pod with one machine and waits until the machine has started. The pod is removed when the test ends.
func (d *Daemon) RunVM(t testing.TB, spec *PodSpec) *Container {
	t.Helper()
	return d.runSpec(t, spec, "vm")
}

// GuestReport is the line that the test guest prints after its boot.
type GuestReport struct {
	Host  string
	Seed  string   // none, nocloud or configdrive
	Net   string   // none, config or dhcp
	Addrs []string // ADDRESS/BITS
	Agent string   // none or started
	Up    string   // seconds since the guest's kernel started
}

// WaitGuest waits until the container's log has the guest's report.
func (c *Container) WaitGuest() GuestReport { return c.WaitGuestBoot(1) }

// WaitGuestBoot waits for the guest's nth report. A guest reports after each boot.
func (c *Container) WaitGuestBoot(n int) GuestReport {
	c.Pod.t.Helper()
	var found []GuestReport
	c.waitText(GuestTimeout, func(text string) error {
		found = guestReports(text)
		if len(found) < n {
			return fmt.Errorf("the guest has booted %d times, want %d:\n%s", len(found), n, text)
		}
		return nil
	})
	return found[n-1]
}

// WaitConsole is like WaitLog, but waits up to GuestTimeout.
func (c *Container) WaitConsole(text string) string {
	c.Pod.t.Helper()
	return c.waitContains(GuestTimeout, text)
}

func guestReports(text string) []GuestReport {
	var all []GuestReport
	for line := range strings.Lines(text) {
		_, fields, ok := strings.Cut(strings.TrimSpace(line), "TRIPOD-GUEST-READY ")
		if !ok {
			continue
		}
		values := map[string]string{}
		for f := range strings.FieldsSeq(fields) {
			k, v, _ := strings.Cut(f, "=")
			values[k] = v
		}
		r := GuestReport{Host: values["host"], Seed: values["seed"], Net: values["net"], Agent: values["agent"], Up: values["up"]}
		if values["addrs"] != "" {
			r.Addrs = strings.Split(values["addrs"], ",")
		}
		all = append(all, r)
	}
	return all
}

// Get requests a path from the pod's web server, over the pod network. It fails the test unless the server answers 200
// within 30 s.
func (p *Pod) Get(path string) string {
	p.t.Helper()
	var body string
	Eventually(p.t, 30*time.Second, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var err error
		body, err = Fetch(ctx, Reconnecting, "http://"+net.JoinHostPort(p.IP(), "80")+path)
		return err
	})
	return body
}

// VMFile returns the path of a file that goes into the machines' images, for tests without a daemon. The name is
// vmlinux, initrd, cmdline, vmlinux-full, initrd-full or disk.qcow2.
func VMFile(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(Root(), "build", "images", "vm", name)
	if _, err := os.Stat(path); err != nil {
		if err := command("hack/images.sh", "build"); err != nil {
			t.Fatal(err)
		}
	}
	return path
}
