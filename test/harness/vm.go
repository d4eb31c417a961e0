package harness

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Images of virtual machines (hack/images/vm.go and tiny.go; hack/images/guest is what the first four run).
const (
	vmPrefix     = ImagePrefix + "tripod/vm/"
	Guest        = vmPrefix + "busybox:1"       // a kernel and an initramfs
	FullGuest    = vmPrefix + "full:1"          // the same with a kernel that has virtio-9p
	DiskGuest    = vmPrefix + "disk:1"          // containerDisk: a disk that boots, with a FAT file system at /disk
	DiskArtifact = vmPrefix + "disk-artifact:1" // the same disk as an artifact
	TinyGuest    = vmPrefix + "tiny:1"          // a boot sector: ticks, obeys the power button
	TinyEnds     = vmPrefix + "tiny-ends:1"     // one line, then off
	TinyDeaf     = vmPrefix + "tiny-deaf:1"     // ticks, does not see the power button
	// What a node must refuse.
	BackingDisk = vmPrefix + "backing:1"   // its disk names a file of the node as backing file
	TwoDisks    = vmPrefix + "two-disks:1" // a containerDisk of two disks
)

// GuestTimeout is how long a guest may take to boot: it is emulated, and the machine may be busy.
const GuestTimeout = 2 * time.Minute

// VM lets machines be emulated, small, and found where `make build` puts what they need.
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

// RunVM runs a pod of one machine, which has started; it is removed when the test ends.
func (d *Daemon) RunVM(t testing.TB, spec *PodSpec) *Container {
	t.Helper()
	name := spec.Name
	if name == "" {
		name = "vm"
	}
	pod := d.RunPodWith(t, PodConfig(t, name, spec.Pod...), "vm")
	t.Cleanup(pod.Remove)
	return pod.Run(ContainerConfig("c", spec.Image, spec.Container...))
}

// GuestReport is the line that the test guest prints when it is up.
type GuestReport struct {
	Host  string
	Seed  string   // none, nocloud or configdrive
	Net   string   // none, config or dhcp
	Addrs []string // ADDRESS/BITS
	Agent string   // none or started
	Up    string   // seconds since its kernel began
}

// WaitGuest waits until the guest has said that it is up, in the container's log.
func (c *Container) WaitGuest() GuestReport { return c.WaitGuestBoot(1) }

// WaitGuestBoot waits until it has said so for the nth time: a guest that reboots says it again.
func (c *Container) WaitGuestBoot(n int) GuestReport {
	c.Pod.t.Helper()
	var found []GuestReport
	c.waitText(GuestTimeout, func(text string) error {
		found = guestReports(text)
		if len(found) < n {
			return fmt.Errorf("the guest was up %d times, not %d:\n%s", len(found), n, text)
		}
		return nil
	})
	return found[n-1]
}

// WaitConsole waits until the machine's console has shown text, as long as a guest may take, and returns all that it showed.
func (c *Container) WaitConsole(text string) string {
	c.Pod.t.Helper()
	var all string
	c.waitText(GuestTimeout, func(have string) error {
		if all = have; !strings.Contains(have, text) {
			return fmt.Errorf("no %q on the console:\n%s", text, have)
		}
		return nil
	})
	return all
}

// waitText waits for something in the container's log, whose last line may be half written.
func (c *Container) waitText(timeout time.Duration, cond func(text string) error) {
	c.Pod.t.Helper()
	Eventually(c.Pod.t, timeout, func() error {
		data, err := os.ReadFile(c.LogFile())
		if err != nil {
			return err
		}
		lines, err := ParseLog(string(data[:bytes.LastIndexByte(data, '\n')+1]))
		if err != nil {
			return err
		}
		return cond(Text(lines, ""))
	})
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

// Get asks a web server of the pod, from the node, over the pod network, and fails the test unless it answers with 200.
func (p *Pod) Get(path string) string {
	p.t.Helper()
	var body string
	Eventually(p.t, 30*time.Second, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(p.IP(), "80")+path, nil)
		if err != nil {
			return err
		}
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		if body = string(data); err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", resp.Status, body)
		}
		return err
	})
	return body
}

// VMFile is the path of a file that the machines' images consist of, for tests without a daemon: vmlinux, initrd, cmdline,
// vmlinux-full, initrd-full or disk.qcow2.
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
