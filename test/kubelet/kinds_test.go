package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// kind is a kind of pod, with what a test of any kind needs to know of it.
type kind struct {
	name string // and its RuntimeClass
	// web is an image that serves HTTP on port 80, and greets with greeting.
	web, greeting string
	// resources are those of the container, in YAML: a machine has its limit as memory. The node has two processors for all
	// tests together.
	resources string
	// replicas is how many pods the tests have of it.
	replicas int
	// grace is the pod's grace period in seconds; the web server of linux does not obey SIGTERM.
	grace int
	// boots is how long a pod may take until it is ready.
	boots time.Duration
	// exec says whether a command can be run in it.
	exec bool
	// prints is a container's image and args, in YAML, that prints says and ends with 0; fails ends with 3.
	prints, says, fails string
}

var kinds = []kind{
	{name: "linux", web: harness.Httpd, greeting: "It works!", resources: "{}", replicas: 3, grace: 1, boots: kube.Timeout, exec: true,
		prints: `image: BUSYBOX, command: [echo, done]`, says: "done\n", fails: `image: BUSYBOX, command: [sh, -c, exit 3]`},
	{name: "wasm", web: harness.HelloHTTP, greeting: "hello from /", resources: "{requests: {cpu: 10m}, limits: {cpu: 500m, memory: 64Mi}}", replicas: 3, grace: 10, boots: kube.Timeout,
		prints: `image: ` + harness.CommandGo + `, args: [out, done]`, says: "done\n", fails: `image: ` + harness.CommandGo + `, args: [exit, "3"]`},
	{name: "vm", web: harness.Guest, greeting: "hello from", resources: "{requests: {cpu: 100m}, limits: {memory: 128Mi}}", replicas: 1, grace: 20, boots: harness.GuestTimeout, exec: true,
		prints: `image: ` + harness.TinyEnds, says: "tick 00001"},
}

// machines bounds the tests that run machines at one time: each of those, emulated, keeps a processor busy while it boots.
var machines = make(chan struct{}, 2)

// reserve waits until a test with pods of the kind may begin.
func (k kind) reserve(t *testing.T) {
	t.Helper()
	if k.name == "vm" {
		machines <- struct{}{}
		t.Cleanup(func() { <-machines })
	}
}

// forKinds runs a test for each kind of pod, in a namespace of its own and beside the others.
func forKinds(t *testing.T, kinds []kind, test func(t *testing.T, k kind, n *kube.Namespace)) {
	t.Helper()
	c := kube.Shared(t)
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			k.reserve(t)
			test(t, k, c.Namespace(t))
		})
	}
}

// fill puts what the kind has in place of the words RUNTIME, WEB, GRACE and RESOURCES of a text, and the busybox image in that of
// BUSYBOX.
func (k kind) fill(text string) string {
	return strings.NewReplacer("RUNTIME", k.name, "WEB", k.web, "GRACE", strconv.Itoa(k.grace), "RESOURCES", k.resources, "BUSYBOX", harness.Busybox).Replace(text)
}

// deployment is a Deployment "web" of the kind's web server, with a Service before it.
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
        readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
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

// client is a pod of which a test calls others.
const client = `
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: client, image: ` + harness.Busybox + `, command: [sleep, "3600"]}]
`

// get asks a web server from the node.
func get(url string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// contains is nil when an answer has a text.
func contains(answer string, err error, text string) error {
	if err == nil && !strings.Contains(answer, text) {
		err = fmt.Errorf("%q is not in the answer: %s", text, answer)
	}
	return err
}

// lockedBuffer may be read while it is written.
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
