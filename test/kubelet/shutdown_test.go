package kubelet

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness/kube"
)

// busConfig is the configuration of a D-Bus daemon to which everybody may talk, to fill in with the socket.
const busConfig = `<busconfig>
<listen>unix:path=%s</listen><auth>EXTERNAL</auth>
<policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/></policy>
</busconfig>`

// startLogind starts a system bus and logind on it, and returns logind. The kubelet uses them from its next start.
func startLogind(t *testing.T, n *kube.Namespace) *stream {
	t.Helper()
	dir := filepath.Join(n.Cluster.Dir, "bus")
	socket, config := filepath.Join(dir, "socket"), filepath.Join(dir, "config")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(config, fmt.Appendf(nil, busConfig, socket), 0o644)); err != nil {
		t.Fatal(err)
	}
	bus := start(t, exec.Command("dbus-daemon", "--nofork", "--nopidfile", "--print-address=1", "--config-file="+config))
	t.Cleanup(bus.stop)
	bus.await(n, "unix:path")
	login := startPeer(t, "logind", socket)
	login.await(n, "serving")
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+socket)
	return login
}

// TestNodeShutdown: before the node shuts down, the kubelet ends the pods of each kind within their grace periods, critical
// ones last, and only then lets the shutdown continue.
func TestNodeShutdown(t *testing.T) {
	c := kube.Shared(t)
	n := c.Namespace(t)
	login := startLogind(t, n)
	if err := c.RestartKubelet(map[string]any{"shutdownGracePeriod": "80s", "shutdownGracePeriodCriticalPods": "20s"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.RestartKubelet(); err != nil {
			t.Fatal(err)
		}
		n.Await("the node is ready", 2*kube.Timeout, c.NodeReady)
	})
	login.await(n, "delayed shutdown kubelet delay\n")
	names := []string{"critical"}
	n.Apply(strings.Replace(client, "name: client}\nspec:", "name: critical}\nspec:\n  priorityClassName: system-node-critical", 1))
	for _, k := range kinds {
		n.Apply(k.fill(`
apiVersion: v1
kind: Pod
metadata: {name: RUNTIME}
spec:
  runtimeClassName: RUNTIME
  terminationGracePeriodSeconds: GRACE
  containers: [{name: web, image: WEB, resources: RESOURCES, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}]
`))
		names = append(names, k.name)
	}
	for i, name := range names {
		n.WaitReady(name, kinds[max(0, i-1)].boots)
	}
	fmt.Fprintln(login.in, "true")
	login.await(n, "released kubelet\n")
	pods := map[string]*corev1.Pod{}
	for _, name := range names {
		pods[name] = n.WaitPod(name, "was ended by the shutdown", kube.Timeout, ended)
	}
	if reason := pods["critical"].Status.Reason; reason != "Terminated" {
		t.Errorf("reason of the critical pod: got %q, want Terminated", reason)
	}
	last := pods["critical"].Status.ContainerStatuses[0].State.Terminated.FinishedAt
	for _, k := range kinds {
		if at := pods[k.name].Status.ContainerStatuses[0].State.Terminated.FinishedAt; last.Before(&at) {
			t.Errorf("end of the pod %s: got %v, want it before the critical pod's, %v", k.name, at, last)
		}
	}
	n.Await("the node's status says that it is shutting down", kube.Timeout, func() error {
		var node corev1.Node
		err := c.Get("/api/v1/nodes/"+kube.NodeName, &node)
		return contains(fmt.Sprint(node.Status.Conditions), err, "shutting down")
	})
	fmt.Fprintln(login.in, "false")
	n.Await("the kubelet delays the next shutdown", kube.Timeout, func() error {
		if strings.Count(login.out.String(), "delayed shutdown kubelet") < 2 {
			return errors.New(login.out.String())
		}
		return nil
	})
}
