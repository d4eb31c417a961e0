package kubelet

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// kind describes a kind of pod for the tests.
type kind struct {
	name string
	// class is the RuntimeClass; the name if it is empty.
	class string
	// web is an image that serves HTTP on port 80. Its answers contain greeting.
	web, greeting string
	// resources are the resources of the container, in YAML. A machine has its limit as memory. The node has two CPUs for
	// all tests together.
	resources string
	// replicas is the number of pods that the tests run.
	replicas int
	// grace is the pod's grace period in seconds; the web server of the kind linux ignores SIGTERM.
	grace int
	// boots limits the time until a pod is ready.
	boots time.Duration
	// exec means that commands can be run in the pod.
	exec bool
	// prints is the image and arguments, in YAML, of a container that prints the text says and exits with 0. fails is the
	// same for a container that exits with 3.
	prints, says, fails string
}

var kinds = []kind{
	containers(),
	{name: "wasm", web: harness.HelloHTTP, greeting: "hello from /", resources: "{requests: {cpu: 10m}, limits: {cpu: 500m, memory: 64Mi}}",
		replicas: 3, grace: 10, boots: kube.Timeout,
		prints: `image: ` + harness.CommandGo + `, args: [out, done]`, says: "done\n",
		fails: `image: ` + harness.CommandGo + `, args: [exit, "3"]`},
	{name: "vm", web: harness.Guest, greeting: "hello from", resources: "{requests: {cpu: 100m}, limits: {memory: 128Mi}}", replicas: 1,
		grace: 20, boots: harness.GuestTimeout, exec: true,
		prints: `image: ` + harness.TinyEnds, says: "tick 00001"},
}

// containers returns the kind of Linux containers: on the node, or in machines if these are the default.
func containers() kind {
	k := kind{name: "linux", web: harness.Httpd, greeting: "It works!", resources: "{}", replicas: 3, grace: 1, boots: kube.Timeout,
		exec:   true,
		prints: `image: BUSYBOX, command: [echo, done]`, says: "done\n", fails: `image: BUSYBOX, command: [sh, -c, exit 3]`}
	if harness.DefaultHandler() != "" {
		return inMachines(k)
	}
	return k
}

// inMachines returns the kind with each pod's containers in a machine of their own.
func inMachines(k kind) kind {
	k.class, k.resources, k.replicas, k.boots = harness.OCIHandler, "{limits: {memory: 128Mi}}", 1, harness.GuestTimeout
	return k
}

// runtimeClass is the kind's RuntimeClass, and its name in the tests.
func (k kind) runtimeClass() string { return cmp.Or(k.class, k.name) }

// machines limits the tests that run machines at the same time, because an emulated machine keeps a CPU busy while it
// boots.
var machines = make(chan struct{}, 2)

// reserve waits until a test with pods of this kind can begin.
func (k kind) reserve(t *testing.T) {
	t.Helper()
	if k.name == "vm" || k.class == harness.OCIHandler {
		machines <- struct{}{}
		t.Cleanup(func() { <-machines })
	}
}

// forKinds runs a test for each kind of pod, in parallel and each in its own namespace.
func forKinds(t *testing.T, kinds []kind, test func(t *testing.T, k kind, n *kube.Namespace)) {
	t.Helper()
	c := kube.Shared(t)
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.runtimeClass(), func(t *testing.T) {
			t.Parallel()
			k.reserve(t)
			test(t, k, c.Namespace(t))
		})
	}
}

// fill replaces the words RUNTIME, WEB, GRACE and RESOURCES in a text with the values of the kind, and BUSYBOX with the
// busybox image.
func (k kind) fill(text string) string {
	return strings.NewReplacer("RUNTIME", k.runtimeClass(), "WEB", k.web, "GRACE", strconv.Itoa(k.grace), "RESOURCES", k.resources, "BUSYBOX",
		harness.Busybox).Replace(text)
}

// deployment returns a Deployment "web" of the kind's web server, and its Service.
func (k kind) deployment(replicas int) string {
	return fmt.Sprintf(k.fill(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: %d
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      runtimeClassName: RUNTIME
      terminationGracePeriodSeconds: GRACE
      containers:
      - name: web
        image: WEB
        ports: [{containerPort: 80}]
        readinessProbe: {httpGet: {port: 80}, periodSeconds: 1, timeoutSeconds: 20}
        resources: RESOURCES
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  selector: {app: web}
  ports: [{port: 8080, targetPort: 80}]
`), replicas)
}

// client is a pod from which a test calls other pods.
const client = `
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: client, image: ` + harness.Busybox + `, command: [sleep, "3600"]}]
`

// get sends a GET request from the node and returns the body.
func get(url string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return harness.Fetch(ctx, harness.Reconnecting, url)
}

// contains returns err, or an error if answer does not contain text.
func contains(answer string, err error, text string) error {
	if err == nil && !strings.Contains(answer, text) {
		err = fmt.Errorf("got answer %q, want it to contain %q", answer, text)
	}
	return err
}

// lockedBuffer is a buffer for concurrent use.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
