package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// denyHostname is a seccomp profile that allows all system calls except sethostname(2).
const denyHostname = `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["sethostname"],"action":"SCMP_ACT_ERRNO"}]}`

func TestSeccomp(t *testing.T) {
	figures := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	d := harness.StartDaemon(t, harness.Set("handlers.linux.allowed_annotations", []string{"io.kubernetes.cri-o.*"}),
		harness.Set("metrics.address", figures))
	d.Pull(t, harness.Busybox)
	profile := filepath.Join(harness.Dir(), "deny-hostname.json")
	if err := os.WriteFile(profile, []byte(denyHostname), 0o644); err != nil {
		t.Fatal(err)
	}
	const mode = "grep Seccomp: /proc/self/status"
	const rename = "hostname changed 2>/dev/null && hostname"
	run := func(t *testing.T, script string, change func(*security)) string {
		return printed(t, d, harness.PodConfig(t, "p"), harness.Busybox, script, change)
	}
	sysAdmin := &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	local := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: profile}
	for name, c := range map[string]struct {
		script string
		change func(*security)
		want   string
	}{
		"should support seccomp unconfined on the container": {mode, func(s *security) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
		}, "Seccomp:\t0"},
		"should support seccomp default on the container": {mode, func(s *security) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		}, "Seccomp:\t2"},
		"should support nil profile, which is unconfined":               {mode, nil, "Seccomp:\t0"},
		"should support seccomp localhost profile on the container":     {mode, func(s *security) { s.Seccomp = local }, "Seccomp:\t2"},
		"should not block setting host name with unconfined, SYS_ADMIN": {rename, func(s *security) { s.Capabilities = sysAdmin }, "changed"},
		"a profile that blocks setting hostname with SYS_ADMIN": {rename,
			func(s *security) { s.Capabilities, s.Seccomp = sysAdmin, local }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := run(t, c.script, c.change); got != c.want {
				t.Errorf("output: got %q, want %q", got, c.want)
			}
		})
	}
	t.Run("runtime should ignore a seccomp profile that blocks setting hostname when privileged", func(t *testing.T) {
		pod := harness.PodConfig(t, "p")
		pod.Linux.SecurityContext.Privileged = true
		got := printed(t, d, pod, harness.Busybox, rename, func(s *security) { s.Privileged, s.Seccomp = true, local })
		if got != "changed" {
			t.Errorf("host name: got %q, want changed", got)
		}
	})
	t.Run("the notifier stops a container, or only reports it, if the node allows the annotation", func(t *testing.T) {
		const key = "io.kubernetes.cri-o.seccompNotifierAction"
		for action, want := range map[string]struct {
			code   int32
			reason string
		}{"log": {0, "Completed"}, "stop": {137, "seccomp killed"}} {
			p := d.RunPod(t, harness.PodConfig(t, action, func(c *runtimeapi.PodSandboxConfig) { c.Annotations = map[string]string{key: action} }))
			c := p.Create(harness.ContainerConfig("c", harness.Busybox, harness.Shell("hostname changed; swapoff /etc/hosts; echo on"),
				harness.Security(func(s *security) {
					s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
				})))
			c.Start()
			s := c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
			if s.ExitCode != want.code || s.Reason != want.reason {
				t.Errorf("%s: end %d, %s (%s), want %d, %s", action, s.ExitCode, s.Reason, s.Message, want.code, want.reason)
			}
			// Only stdout: stderr is a pipe of its own, and the log can have its lines later.
			if output := harness.Text(c.Logs(), "stdout"); (output == "on\n") != (action == "log") {
				t.Errorf("%s: output %q", action, output)
			}
			p.Remove()
		}
		resp, err := http.Get("http://" + figures + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if text, err := io.ReadAll(resp.Body); err != nil ||
			!strings.Contains(string(text), `tripod_seccomp_forbidden_calls_total{syscall="sethostname"} 2`) {
			t.Errorf("the metrics do not count two calls of sethostname, error %v", err)
		}
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("true"))
		config.Annotations = map[string]string{key: "log"}
		if why := refused(t, d, p, config); !strings.Contains(why, "needs a seccomp profile") {
			t.Errorf("an unconfined container with a notifier: %s", why)
		}
	})
	t.Run("a profile that is not there is refused", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		refused(t, d, p, harness.ContainerConfig("c", harness.Busybox, harness.Security(func(s *security) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "/no/such/profile.json"}
		})))
	})
}

func TestNoNewPrivs(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.NoNewPrivs)
	run := func(t *testing.T, deny bool) string {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		config := harness.ContainerConfig("c", harness.NoNewPrivs,
			harness.Security(func(s *security) { s.RunAsUser, s.NoNewPrivs = value(1000), deny }))
		c := p.Create(config)
		c.Start()
		c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
		return harness.Text(c.Logs(), "")
	}
	t.Run("should not allow privilege escalation when true", func(t *testing.T) {
		if got := run(t, true); !strings.Contains(got, "Effective uid: 1000") {
			t.Errorf("output: got %q, want the effective uid 1000", got)
		}
	})
	t.Run("should allow privilege escalation when false", func(t *testing.T) {
		if got := run(t, false); !strings.Contains(got, "Effective uid: 0") {
			t.Errorf("output: got %q, want the effective uid 0", got)
		}
	})
}

func TestSysctls(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	pod := func(name, value string) *runtimeapi.PodSandboxConfig {
		c := harness.PodConfig(t, "p")
		c.Linux.Sysctls = map[string]string{name: value}
		return c
	}
	t.Run("should support safe sysctls", func(t *testing.T) {
		if got := printed(t, d, pod("kernel.shm_rmid_forced", "1"), harness.Busybox, "cat /proc/sys/kernel/shm_rmid_forced", nil); got != "1" {
			t.Errorf("kernel.shm_rmid_forced: got %q, want 1", got)
		}
		if got := printed(t, d, pod("net.ipv4.ip_local_port_range", "20000 30000"), harness.Busybox, "cat /proc/sys/net/ipv4/ip_local_port_range",
			nil); strings.Join(strings.Fields(got), " ") != "20000 30000" {
			t.Errorf("net.ipv4.ip_local_port_range: got %q, want 20000 30000", got)
		}
	})
	t.Run("should support unsafe sysctls", func(t *testing.T) {
		if got := printed(t, d, pod("fs.mqueue.msg_max", "100"), harness.Busybox, "cat /proc/sys/fs/mqueue/msg_max", nil); got != "100" {
			t.Errorf("fs.mqueue.msg_max: got %q, want 100", got)
		}
	})
	t.Run("C3 a sysctl of the node is refused", func(t *testing.T) {
		for _, name := range []string{"kernel.core_pattern", "kernel.shm_rmid_forced=1+kernel.core_pattern", "vm.swappiness",
			"net.ipv4/../../kernel/core_pattern"} {
			_, err := d.CRI().RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: pod(name, "x")})
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("RunPodSandbox with the sysctl %s: got error %v, want InvalidArgument", name, err)
			}
		}
	})
}
