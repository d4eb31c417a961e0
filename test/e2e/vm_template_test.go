package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

const continuedLine = "a machine has continued from a template"

// TestVMTemplates: a machine whose pod asks for it continues from a template, as the pod's own instance: with its name, network,
// volumes, environment and random numbers. One that cannot continue boots. Templates can be made before the first pod.
func TestVMTemplates(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	run := func(name, volume string) *harness.Container {
		c := d.RunVM(t, &harness.PodSpec{
			Name: name, Image: harness.DiskGuest,
			Pod: []harness.PodOption{func(p *runtimeapi.PodSandboxConfig) {
				p.Hostname = name
				p.Annotations = map[string]string{"tripod.dev/vm.template": "cloud-init", "tripod.dev/vm.scratch-disks": "/dev/scratch=1Mi"}
			}},
			Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
				c.Mounts = []*runtimeapi.Mount{{HostPath: volume, ContainerPath: "/srv/own"}}
			}},
		})
		report := c.WaitGuest()
		if report.Host != name || report.Net != "config" || !strings.HasPrefix(report.Addrs[0], c.Pod.IP()+"/") {
			t.Errorf("the guest of %s with the address %s: got the report %+v", name, c.Pod.IP(), report)
		}
		return c
	}
	run("cold", t.TempDir())
	made := func() bool { return strings.Contains(d.DaemonLog(), "made a template") }
	until.Within(t, harness.GuestTimeout, "a template is made", made)
	seen := map[string]string{}
	for _, name := range []string{"one", "two"} {
		volume := t.TempDir()
		c := run(name, volume)
		c.Must("sh", "-c", "echo $(hostname) >/srv/own/file; echo mine >/dev/scratch")
		if got, err := os.ReadFile(filepath.Join(volume, "file")); err != nil || string(got) != name+"\n" {
			t.Errorf("file of %s in its volume: got %q, error %v", name, got, err)
		}
		random := c.Must("sh", "-c", "head -c 32 /dev/urandom | sha256sum")
		if other := seen[random]; other != "" {
			t.Errorf("%s and %s have drawn the same random number %s", name, other, random)
		}
		seen[random] = name
	}
	if log := d.DaemonLog(); strings.Count(log, continuedLine) != 2 || strings.Contains(log, "boots instead") {
		t.Errorf("machines that have continued from a template: got %d, want 2; log: %s", strings.Count(log, continuedLine), log)
	}
	found, err := filepath.Glob(filepath.Join(d.Root, "vm", "templates", "[0-9a-f]*", "state"))
	if err != nil || len(found) != 1 {
		t.Fatalf("templates: got %v, error %v, want one", found, err)
	}
	if err := os.Truncate(found[0], 1000); err != nil {
		t.Fatal(err)
	}
	run("damaged", t.TempDir())
	if log := d.DaemonLog(); strings.Count(log, "boots instead") != 1 {
		t.Errorf("a damaged template: want that its machine boots, and the log says so; log: %s", log)
	}
	createTemplate(t, d)
}

const templatePod = `
apiVersion: v1
kind: Pod
metadata: {name: like, namespace: other, annotations: {tripod.dev/vm.template: cloud-init}}
spec:
  runtimeClassName: vm
  containers: [{name: vm, image: ` + harness.DiskGuest + `}]
`

// createTemplate makes a template by the command line, before the first pod of its kind.
func createTemplate(t *testing.T, d *harness.Daemon) {
	file := filepath.Join(t.TempDir(), "pod.yaml")
	if err := os.WriteFile(file, []byte(templatePod), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := tripod(t, d, "vm", "template", "create", "-f", file, "--volume-dir", t.TempDir(), "--log-dir", t.TempDir()).CombinedOutput()
	name := strings.TrimSpace(string(out))
	if _, missing := os.Stat(filepath.Join(d.Root, "vm", "templates", name, "state")); err != nil || missing != nil {
		t.Fatalf("tripod vm template create: got %q, error %v, want the name of a template", out, err)
	}
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{name, " vm ", " other "} {
		if out, err := exec.Command(bin, "vm", "template", "ls", "--config", d.ConfigPath()).Output(); err != nil ||
			!strings.Contains(string(out), word) {
			t.Errorf("tripod vm template ls: got %q, error %v, want %q", out, err, word)
		}
	}
	if list, err := d.CRI().ListPodSandbox(t.Context(),
		&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{}}); err != nil || strings.Contains(list.String(), "other") {
		t.Errorf("pods after the command: got %v, error %v", list, err)
	}
	plain := strings.ReplaceAll(strings.ReplaceAll(templatePod, "annotations", "labels"), "tripod.dev/vm.template: cloud-init", "a: b")
	if err := os.WriteFile(file, []byte(plain), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err = tripod(t, d, "vm", "template", "create", "-f", file, "--volume-dir", t.TempDir(), "--log-dir", t.TempDir()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "does not continue from a template") {
		t.Errorf("a pod that asks for no template: got %q, error %v", out, err)
	}
}
