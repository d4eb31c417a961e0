package kubelet

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// stream is a running kubectl with its input and output.
type stream struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  lockedBuffer
	done chan error
}

func start(t *testing.T, cmd *exec.Cmd) *stream {
	t.Helper()
	s := &stream{cmd: cmd, done: make(chan error, 1)}
	cmd.Stdout, cmd.Stderr = &s.out, &s.out
	var err error
	if s.in, err = cmd.StdinPipe(); err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() { s.done <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return s
}

// startLog follows the log of a pod from its beginning.
func startLog(t *testing.T, n *kube.Namespace, args ...string) *stream {
	t.Helper()
	return start(t, n.KubectlCommand(append([]string{"logs", "-f"}, args...)...))
}

// wait waits until the program ends by itself, and returns its output.
func (s *stream) wait(t *testing.T) string {
	t.Helper()
	select {
	case <-s.done:
	case <-time.After(kube.Timeout):
		t.Fatalf("%v did not end within %v; output %q", s.cmd.Args, kube.Timeout, s.out.String())
	}
	return s.out.String()
}

// await waits until the output contains text.
func (s *stream) await(n *kube.Namespace, text string) {
	n.Await(fmt.Sprintf("%q from %v", text, s.cmd.Args), kube.Timeout, func() error {
		return contains(s.out.String(), nil, text)
	})
}

func (s *stream) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGINT)
	<-s.done
}

// counters maps each kind to a container that prints numbered lines.
var counters = map[string]string{
	"linux": `image: BUSYBOX, command: [sh, -c, "trap exit TERM; i=0; while :; do i=$((i+1)); echo line $i; sleep 0.5; done"]`,
	"wasm":  `image: ` + harness.CommandGo + `, args: [` + countTo(200) + `out, end]`,
	"vm":    `image: ` + harness.TinyGuest,
}

func countTo(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "out, line %d, sleep, 500ms, ", i+1)
	}
	return b.String()
}

// TestLogs: a log can be followed and read from the end, and a container can be attached to.
func TestLogs(t *testing.T) {
	lines := map[string]string{"linux": "line 3", "wasm": "line 3", "vm": "tick 00003"}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: counter}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  containers: [{name: c, resources: RESOURCES, ` + counters[k.name] + `}]
`))
		n.WaitPhase("counter", corev1.PodRunning, k.boots)
		follow := startLog(t, n, "counter")
		follow.await(n, lines[k.name])
		follow.stop()
		if last := n.Kubectl("logs", "counter", "--tail=1", "--timestamps"); strings.Count(last, "\n") != 1 ||
			!regexp.MustCompile(`^\d{4}-\d\d-\d\dT`).MatchString(last) {
			t.Errorf("kubectl logs --tail=1 --timestamps: got %q, want one line with a time", last)
		}
		attached := start(t, n.KubectlCommand("attach", "counter"))
		attached.await(n, strings.Fields(lines[k.name])[0])
		attached.stop()
	})
}

// TestInteractive: the input of kubectl attach reaches the process, the component or the console.
func TestInteractive(t *testing.T) {
	shells := map[string]string{
		"linux": `image: BUSYBOX, command: [sh]`,
		"wasm":  `image: ` + harness.CommandGo + `, args: [stdin]`,
		"vm":    `image: WEB`,
	}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: shell}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: GRACE
  containers: [{name: c, stdin: true, resources: RESOURCES, ` + shells[k.name] + `}]
`))
		n.WaitPhase("shell", corev1.PodRunning, k.boots)
		typed, answer := "echo typed $((40 + 2))", "typed 42"
		switch k.name {
		case "wasm":
			answer = typed
		case "vm":
			n.WaitLog("TRIPOD-GUEST-READY", k.boots, "shell")
		}
		attached := start(t, n.KubectlCommand("attach", "-i", "shell"))
		n.Await("an answer to the input", k.boots, func() error {
			fmt.Fprintln(attached.in, typed)
			return contains(attached.out.String(), nil, answer)
		})
		attached.stop()
	})
}

// TestExecAndCopy: kubectl exec and kubectl cp pass input, output and files on unchanged.
func TestExecAndCopy(t *testing.T) {
	forKinds(t, []kind{kinds[0], kinds[2]}, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.deployment(1))
		pod := n.WaitPods("app=web", 1, k.boots)[0].Name
		n.Await("exec in "+pod, k.boots, func() error { // a machine's agent starts after its web server
			out, err := n.KubectlInput("one\ntwo\n", "exec", "-i", pod, "--", "wc", "-l")
			return contains(out, err, "2")
		})
		dir := t.TempDir()
		sent, back := filepath.Join(dir, "sent"), filepath.Join(dir, "back")
		content := bytes.Repeat([]byte("0123456789abcde\x00"), 1<<15)
		if err := os.WriteFile(sent, content, 0o644); err != nil {
			t.Fatal(err)
		}
		n.Kubectl("cp", sent, pod+":/tmp/file")
		n.Kubectl("cp", pod+":/tmp/file", back)
		if got, err := os.ReadFile(back); err != nil || !bytes.Equal(got, content) {
			t.Errorf("copied file: got %d bytes, error %v; want the %d bytes sent", len(got), err, len(content))
		}
	})
}

func TestPortForward(t *testing.T) {
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.deployment(1))
		n.WaitPods("app=web", 1, k.boots)
		forward := start(t, n.KubectlCommand("port-forward", "deployment/web", ":80"))
		forward.await(n, "Forwarding from 127.0.0.1:")
		port := regexp.MustCompile(`127\.0\.0\.1:(\d+)`).FindStringSubmatch(forward.out.String())[1]
		for range 3 {
			answer, err := get("http://127.0.0.1:" + port + "/")
			if err := contains(answer, err, k.greeting); err != nil {
				t.Errorf("request through the forwarded port: %v", err)
			}
		}
		forward.stop()
	})
}
