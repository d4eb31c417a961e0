package debian

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// templateGuest is one of several pods with the same user data.
type templateGuest struct {
	*harness.Container
	t    *testing.T
	d    *harness.Daemon
	name string
}

// run runs a script in the guest and returns its output.
func (g templateGuest) run(script string) (string, error) { return runIn(g.t, g.d, g.ID, script) }

// TestTemplates: machines of pods with the same user data continue from a template, in which cloud-init was done. Each is an
// instance of its own: with its own name, address, keys, random numbers, machine ID, environment and volumes.
func TestTemplates(t *testing.T) {
	push(t)
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 512<<20))
	shared := directory(t, "shared")
	run := func(name string) templateGuest {
		c := d.RunVM(t, &harness.PodSpec{
			Name: name, Image: image,
			Pod: []harness.PodOption{func(p *runtimeapi.PodSandboxConfig) {
				p.Hostname = name
				p.Annotations = map[string]string{
					"tripod.dev/vm.template": "cloud-init", "tripod.dev/vm.ssh-keys": sshKey + "-" + name,
					"tripod.dev/vm.cloud-init-user-data": "locale: false\nruncmd: [[sh, -c, 'echo $(hostname) >>/run/by-the-user']]\n",
				}
				p.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.9.8.7"}}
			}},
			Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
				c.Envs = []*runtimeapi.KeyValue{{Key: "GREETING", Value: []byte("I am " + name)}}
				c.Mounts = []*runtimeapi.Mount{{HostPath: shared, ContainerPath: "/srv/shared"},
					{HostPath: directory(t, name), ContainerPath: "/srv/own", Readonly: true}}
			}},
		})
		return templateGuest{c, t, d, name}
	}
	began := time.Now()
	run("first").Pod.Remove() // it is enough that it was started
	harness.Eventually(t, bootTime, func() error {
		if log := d.DaemonLog(); !strings.Contains(log, "made a template of machines") {
			return errors.New("no template is made")
		}
		return nil
	})
	t.Logf("a template is made after %s", time.Since(began).Round(time.Second))
	began = time.Now()
	second, third := run("second"), run("third")
	t.Logf("two machines are started after %s", time.Since(began).Round(time.Millisecond))
	for _, g := range []templateGuest{second, third} {
		harness.Eventually(t, bootTime, func() error {
			_, err := g.run("cat /run/cloud-init/result.json && ! systemctl is-active tripod-renew")
			return err
		})
		t.Logf("cloud-init of %s is done after %s", g.name, time.Since(began).Round(time.Second))
	}
	if n := strings.Count(d.DaemonLog(), "a machine has continued from a template"); n != 2 {
		t.Errorf("machines that have continued from a template: got %d, want 2", n)
	}
	for _, g := range []templateGuest{second, third} {
		name := g.name
		for what, want := range map[string]struct{ script, has string }{
			"errors":      {"tr -d ' \\n' </run/cloud-init/result.json", `"errors":[]`},
			"host name":   {"hostname; cat /etc/hostname", name + "\n" + name + "\n"},
			"ssh key":     {"cat ~debian/.ssh/authorized_keys", sshKey + "-" + name},
			"address":     {"ip -o -4 address", " " + g.Pod.IP() + "/"},
			"route":       {"ip route", "default via "},
			"DNS":         {"resolvectl dns", "10.9.8.7"},
			"environment": {"set -a; . /etc/cloud/environment; echo \"$GREETING\"", "I am " + name + "\n"},
			"own command": {"cat /run/by-the-user", "\n" + name + "\n"},
			"share":       {"echo from the guest >/srv/shared/" + name + " && grep /srv/ /proc/mounts", "/srv/shared virtiofs rw"},
			"own share":   {"cat /srv/own/name", name + "\n"},
			"agent":       {"systemctl is-active tripod-agent", "active\n"},
			"failed":      {"systemctl --failed --no-legend; systemctl is-active ssh", "active\n"},
		} {
			if out, err := g.run(want.script); err != nil || !strings.Contains(out, want.has) {
				t.Errorf("%s, %s: got %q, error %v; want it to contain %q", name, what, out, err, want.has)
			}
		}
		if note, err := os.ReadFile(filepath.Join(shared, name)); err != nil || string(note) != "from the guest\n" {
			t.Errorf("%s: the guest's file on the node: got %q, error %v", name, note, err)
		}
	}
	for what, script := range map[string]string{
		"machine ID": "cat /etc/machine-id", "host key": "cat /etc/ssh/ssh_host_ed25519_key.pub",
		"random numbers": "od -An -tx8 -N16 /dev/urandom",
		"instance":       "cat /var/lib/cloud/data/instance-id",
	} {
		seen := map[string]string{}
		for _, g := range []templateGuest{second, third} {
			out, err := g.run(script)
			if other, twice := seen[out]; err != nil || twice {
				t.Errorf("%s of %s: got %q, which %q has, too; error %v", what, g.name, out, other, err)
			}
			seen[out] = g.name
		}
	}
	second.Stop(5 * time.Minute)
	if s := second.WaitExit(0); s.Reason != "Completed" {
		t.Errorf("status after the stop: got %v, want reason Completed", s)
	}
}
