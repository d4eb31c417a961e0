package kubelet

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestInitContainersAndSidecars: two init containers run in order; a sidecar starts before the second and ends after
// the container.
func TestInitContainersAndSidecars(t *testing.T) {
	forKinds(t, kinds[:1], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: steps}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 5
  initContainers:
  - {name: first, image: BUSYBOX, command: [sh, -c, "echo first >>/steps/log"], volumeMounts: [{name: steps, mountPath: /steps}]}
  - name: sidecar
    image: BUSYBOX
    restartPolicy: Always
    command: [sh, -c, "echo sidecar >>/steps/log; trap 'cat /steps/log; exit' TERM; sleep 3600 & wait"]
    startupProbe: {periodSeconds: 1, exec: {command: [grep, sidecar, /steps/log]}}
    volumeMounts: [{name: steps, mountPath: /steps}]
  - {name: second, image: BUSYBOX, command: [sh, -c, "echo second >>/steps/log"], volumeMounts: [{name: steps, mountPath: /steps}]}
  containers:
  - {name: main, image: BUSYBOX, command: [sh, -c, "echo main >>/steps/log"], volumeMounts: [{name: steps, mountPath: /steps}]}
  volumes: [{name: steps, emptyDir: {}}]
`))
		n.WaitPhase("steps", corev1.PodSucceeded, k.boots)
		if log := n.Kubectl("logs", "steps", "-c", "sidecar"); log != "first\nsidecar\nsecond\nmain\n" {
			t.Errorf("order of the steps: got %q, want first, sidecar, second, main", log)
		}
	})
}

// TestUnitPodsHaveOneContainer: further containers in a unit pod are refused with a message that gives the reason.
func TestUnitPodsHaveOneContainer(t *testing.T) {
	forKinds(t, kinds[1:], func(t *testing.T, k kind, n *kube.Namespace) {
		n.ExpectRestarts()
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: two}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  containers:
  - {name: one, image: WEB, resources: RESOURCES}
  - {name: other, image: WEB, resources: RESOURCES}
---
apiVersion: v1
kind: Pod
metadata: {name: prepared}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  initContainers: [{name: first, image: WEB, resources: RESOURCES}]
  containers: [{name: one, image: WEB, resources: RESOURCES}]
---
apiVersion: v1
kind: Pod
metadata: {name: one}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 5
  containers: [{name: one, image: WEB, resources: RESOURCES, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}]
`))
		waitEvent(n, "two", "one container")
		n.WaitReady("one", k.boots)
		// The container's status has the refusal from the kubelet's next round on; kubectl prints it, and waits.
		debug := start(t, n.KubectlCommand("debug", "one", "--image", harness.Busybox, "--container", "debugger", "-i", "--", "sleep", "1"))
		n.WaitPod("one", "says why there is no debugger", kube.Timeout, func(p *corev1.Pod) bool {
			s := p.Status.EphemeralContainerStatuses
			return len(s) > 0 && s[0].State.Waiting != nil && s[0].State.Waiting.Reason == "CreateContainerError" &&
				strings.Contains(s[0].State.Waiting.Message, "one container")
		})
		debug.await(n, "one container")
		if !kube.Ready(n.Pod("one")) {
			t.Errorf("pod after the refusal: got %s, want ready", kube.Describe(n.Pod("one")))
		}
	})
}

// TestComponentBesideContainers: in a pod of Linux containers, components are init containers and servers. A sidecar and a
// container for debugging reach them on the pod's loopback.
func TestComponentBesideContainers(t *testing.T) {
	forKinds(t, kinds[:1], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: mixed, annotations: {vimana.host/cleartext-port.web: "8080", vimana.host/tls: "off"}}
spec:
  terminationGracePeriodSeconds: 5
  initContainers:
  - {name: write, image: ` + harness.CommandGo + `, args: [write, /shared/a, component], volumeMounts: [{name: shared, mountPath: /shared}]}
  - name: sidecar
    image: BUSYBOX
    restartPolicy: Always
    command: [sh, -c, "cat /shared/a; trap exit TERM; while :; do wget -q -O - http://127.0.0.1:8080/x; sleep 1; done"]
    resources: {limits: {cpu: 200m, memory: 32Mi}}
    volumeMounts: [{name: shared, mountPath: /shared}]
  containers:
  - name: web
    image: ` + harness.HelloHTTP + `
    readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
    livenessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
    resources: {limits: {cpu: 500m, memory: 64Mi}}
  volumes: [{name: shared, emptyDir: {}}]
`))
		n.WaitReady("mixed", k.boots)
		n.WaitLog("component", kube.Timeout, "mixed", "-c", "sidecar")
		n.WaitLog("hello from", kube.Timeout, "mixed", "-c", "sidecar")
		if out, err := n.TryKubectl("exec", "mixed", "-c", "web", "--", "sh"); err == nil || !strings.Contains(err.Error(), "kubectl debug") {
			t.Errorf("exec: got output %q, error %v; want one that says what can be done", out, err)
		}
		n.Kubectl("debug", "mixed", "--image", harness.Busybox, "--container", "debugger", "--attach=false", "--", "wget", "-q", "-O", "-",
			"http://127.0.0.1:8080/debug")
		n.WaitLog("hello from", kube.Timeout, "mixed", "-c", "debugger")
	})
}

func TestEphemeralContainer(t *testing.T) {
	forKinds(t, kinds[:1], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(client)
		n.WaitReady("client", k.boots)
		n.Kubectl("debug", "client", "--image", harness.Busybox, "--container", "debugger", "--target", "client", "--attach=false",
			"--", "sh", "-c", "ps; echo looked; exit 4")
		pod := n.WaitPod("client", "has a debugger that ended", kube.Timeout, func(p *corev1.Pod) bool {
			s := p.Status.EphemeralContainerStatuses
			return len(s) > 0 && s[0].State.Terminated != nil
		})
		if end := pod.Status.EphemeralContainerStatuses[0].State.Terminated; end.ExitCode != 4 {
			t.Errorf("exit code of the debugger: got %d, want 4", end.ExitCode)
		}
		if log := n.WaitLog("looked", kube.Timeout, "client", "-c", "debugger"); !strings.Contains(log, "sleep 3600") {
			t.Errorf("ps in the debugger: got %s, want the target's sleep 3600", log)
		}
	})
}

// TestRestartPolicies: a container that ends is restarted according to the pod's policy, after growing pauses.
func TestRestartPolicies(t *testing.T) {
	c := kube.Shared(t)
	t.Parallel()
	for _, test := range []struct {
		kind   kind
		policy corev1.RestartPolicy
		fails  bool
		// phase is the pod's last phase; "" means that its container is restarted forever.
		phase corev1.PodPhase
	}{
		{kind: kinds[0], policy: corev1.RestartPolicyNever, phase: corev1.PodSucceeded},
		{kind: kinds[0], policy: corev1.RestartPolicyNever, fails: true, phase: corev1.PodFailed},
		{kind: kinds[0], policy: corev1.RestartPolicyOnFailure, phase: corev1.PodSucceeded},
		{kind: kinds[0], policy: corev1.RestartPolicyOnFailure, fails: true},
		{kind: kinds[0], policy: corev1.RestartPolicyAlways},
		{kind: kinds[1], policy: corev1.RestartPolicyNever, phase: corev1.PodSucceeded},
		{kind: kinds[1], policy: corev1.RestartPolicyNever, fails: true, phase: corev1.PodFailed},
		{kind: kinds[1], policy: corev1.RestartPolicyOnFailure, phase: corev1.PodSucceeded},
		{kind: kinds[1], policy: corev1.RestartPolicyOnFailure, fails: true},
		{kind: kinds[1], policy: corev1.RestartPolicyAlways},
		{kind: kinds[2], policy: corev1.RestartPolicyNever, phase: corev1.PodSucceeded},
		{kind: kinds[2], policy: corev1.RestartPolicyAlways},
	} {
		container, outcome := test.kind.prints, "ends"
		if test.fails {
			container, outcome = test.kind.fails, "fails"
		}
		t.Run(fmt.Sprintf("%s/%s/%s", test.kind.runtimeClass(), test.policy, outcome), func(t *testing.T) {
			t.Parallel()
			test.kind.reserve(t)
			k, n := test.kind, c.Namespace(t)
			n.Apply(k.fill(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: ends}
spec:
  runtimeClassName: RUNTIME
  restartPolicy: %s
  containers: [{name: c, resources: RESOURCES, %s}]
`, test.policy, container)))
			if test.phase != "" {
				n.WaitPhase("ends", test.phase, k.boots)
				return
			}
			n.ExpectRestarts()
			checkRestarts(t, k, n, test.fails)
		})
	}
}

// checkRestarts waits until the pod "ends" has been restarted twice and has reported CrashLoopBackOff.
func checkRestarts(t *testing.T, k kind, n *kube.Namespace, fails bool) {
	t.Helper()
	var paused bool
	pod := n.WaitPod("ends", "was restarted twice", 2*k.boots, func(p *corev1.Pod) bool {
		s := p.Status.ContainerStatuses
		if len(s) == 0 {
			return false
		}
		paused = paused || s[0].State.Waiting != nil && s[0].State.Waiting.Reason == "CrashLoopBackOff"
		return paused && s[0].RestartCount >= 2
	})
	last := pod.Status.ContainerStatuses[0].LastTerminationState.Terminated
	switch {
	case last == nil:
		t.Errorf("the pod has no last termination state: %s", kube.Describe(pod))
	case fails && last.ExitCode != 3 || !fails && last.ExitCode != 0:
		t.Errorf("last exit code: got %d, want 3 for a failure and 0 otherwise", last.ExitCode)
	}
	// The kubelet keeps one container that has ended, and may remove it before the API server knows the next.
	n.Await("the log of the previous container", kube.Timeout, func() error {
		log, err := n.TryKubectl("logs", "ends", "--previous")
		if err == nil && !fails && !strings.HasPrefix(log, k.says) {
			err = fmt.Errorf("previous log: got %q, want prefix %q", log, k.says)
		}
		return err
	})
}

// TestHooks: postStart ends before the container counts as started, and preStop ends before the container gets its
// signal.
func TestHooks(t *testing.T) {
	forKinds(t, kinds[:1], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: hooked}
spec:
  terminationGracePeriodSeconds: 20
  containers:
  - name: c
    image: BUSYBOX
    command: [sh, -c, "trap 'echo told to end; exit' TERM; echo begun; while :; do sleep 1 & wait $!; done"]
    lifecycle:
      postStart: {exec: {command: [sh, -c, "echo postStart >/proc/1/fd/1; touch /started"]}}
      preStop: {exec: {command: [sh, -c, "echo preStop >/proc/1/fd/1; sleep 2"]}}
    readinessProbe: {exec: {command: [test, -e, /started]}, periodSeconds: 1}
`))
		n.WaitReady("hooked", k.boots)
		follow := startLog(t, n, "hooked")
		n.Kubectl("delete", "pod", "hooked")
		log := follow.wait(t)
		want := []string{"postStart", "preStop", "told to end"}
		got := slices.DeleteFunc(strings.Fields(strings.ReplaceAll(log, "told to end", "told_to_end")),
			func(s string) bool { return s == "begun" })
		if strings.ReplaceAll(strings.Join(got, ","), "_", " ") != strings.Join(want, ",") {
			t.Errorf("order of the hooks: got %s, want %v", log, want)
		}
	})
}

// TestHooksOfUnits: components and machines support HTTP and sleep hooks; machines also support hooks that run a
// command.
func TestHooksOfUnits(t *testing.T) {
	postStart := map[string]string{"wasm": "httpGet: {port: 80, path: /started}", "vm": "exec: {command: [touch, /started]}"}
	annotations := map[string]string{"vm": `tripod.dev/vm.wait-for-agent: "true"`}
	forKinds(t, kinds[1:], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: hooked, annotations: {` + annotations[k.name] + `}}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 20
  containers:
  - name: c
    image: WEB
    resources: RESOURCES
    lifecycle: {postStart: {` + postStart[k.name] + `}, preStop: {sleep: {seconds: 5}}}
    readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
`))
		pod := n.WaitReady("hooked", k.boots)
		began := time.Now()
		n.Kubectl("delete", "pod", "hooked", "--wait=false")
		// The pod serves while the hook runs.
		for time.Since(began) < 3*time.Second {
			if answer, err := get("http://" + pod.Status.PodIP + "/"); contains(answer, err, k.greeting) != nil {
				t.Fatalf("request %v after the deletion, during the hook: %v", time.Since(began), err)
			}
			time.Sleep(200 * time.Millisecond) // pacing
		}
		n.WaitGone("pods/hooked", kube.Timeout)
	})
}

// TestGracefulDeletion: a deleted pod can finish its work in the grace period.
func TestGracefulDeletion(t *testing.T) {
	containers := map[string]string{
		"linux": `image: BUSYBOX, command: [sh, -c, "trap 'sleep 2; echo ended well; exit' TERM; echo begun; while :; do sleep 1 & wait $!; done"]`,
		"wasm":  `image: ` + harness.GreeterC,
		"vm":    `image: WEB`,
	}
	forKinds(t, kinds, func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: ends}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: 60
  containers: [{name: c, resources: RESOURCES, ` + containers[k.name] + `}]
`))
		ip := n.WaitPhase("ends", corev1.PodRunning, k.boots).Status.PodIP
		var last *stream
		var begun, end string
		switch k.name {
		case "linux":
			last, begun, end = startLog(t, n, "ends"), "begun", "ended well"
		case "wasm": // a stream of answers that ends with 0
			bin, err := harness.Binary()
			if err != nil {
				t.Fatal(err)
			}
			countdown := exec.Command(bin, "call", ip+":80", "greet.v1.Greeter/Countdown", `{"from": 50, "interval_ms": 100}`)
			last, begun, end = start(t, countdown), "48", `"number":0`
		case "vm":
			last, begun, end = startLog(t, n, "ends"), "TRIPOD-GUEST-READY", "TRIPOD-GUEST-POWEROFF"
		}
		n.Await(begun, k.boots, func() error { return contains(last.out.String(), nil, begun) })
		began := time.Now()
		n.Kubectl("delete", "pod", "ends")
		if log := strings.ReplaceAll(last.wait(t), " ", ""); !strings.Contains(log, strings.ReplaceAll(end, " ", "")) {
			t.Errorf("output of the deleted pod: got %s, want it to contain %q", log, end)
		}
		if took := time.Since(began); took > 50*time.Second {
			t.Errorf("the deletion took %v, want less than the grace period", took)
		}
	})
}

// TestFullVolume: a pod that exceeds the size limit of its volume is evicted.
func TestFullVolume(t *testing.T) {
	forKinds(t, kinds[:1], func(t *testing.T, k kind, n *kube.Namespace) {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: greedy}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: c, image: BUSYBOX, command: [sh, -c, "head -c 4000000 /dev/zero >/scratch/file; sleep 3600"], volumeMounts: [{name: scratch, mountPath: /scratch}]}
  volumes: [{name: scratch, emptyDir: {sizeLimit: 1Mi}}]
`))
		n.WaitPod("greedy", "is evicted", 2*kube.Timeout, func(p *corev1.Pod) bool { return p.Status.Reason == "Evicted" })
	})
}
