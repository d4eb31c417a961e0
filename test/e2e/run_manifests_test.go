package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// manifestRun runs `tripod run -f` and `rmp` with directories of its own.
type manifestRun struct {
	*testing.T
	d       *harness.Daemon
	volumes string
}

// run runs a manifest from the standard input and returns the exit code.
func (r manifestRun) run(manifest string, args ...string) (stdout, stderr string, code int) {
	r.Helper()
	c := tripod(r.T, r.d, append([]string{"run", "-f", "-", "--volume-dir", r.volumes, "--log-dir", r.TempDir()}, args...)...)
	var out, problems bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = strings.NewReader(manifest), &out, &problems
	err := c.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return out.String(), problems.String(), exit.ExitCode()
	}
	if err != nil {
		r.Fatal(err)
	}
	return out.String(), problems.String(), 0
}

// nothingLeft checks that no pod and no volume exists.
func (r manifestRun) nothingLeft(after string) {
	r.Helper()
	pods, err := r.d.Runtime().ListPodSandbox(r.Context(), nil)
	if err != nil || len(pods) > 0 {
		r.Errorf("pods after %s: got %v, %v; want none", after, pods, err)
	}
	if left, _ := os.ReadDir(r.volumes); len(left) > 0 {
		r.Errorf("volumes after %s: got %v, want none", after, left)
	}
}

func (r manifestRun) removeAll() {
	r.Helper()
	if out, err := tripod(r.T, r.d, "rmp", "--all", "--force", "--volume-dir", r.volumes).CombinedOutput(); err != nil {
		r.Fatalf("rmp: %v\n%s", err, out)
	}
}

// TestRunManifests: `run -f` runs the sample manifest, which has a pod of each kind, and leaves nothing behind when a field
// is not supported, a step fails, or the pods have ended.
func TestRunManifests(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t))
	r := manifestRun{t, d, filepath.Join(t.TempDir(), "volumes")}
	text, err := os.ReadFile(filepath.Join(harness.Root(), "contrib/manifests/three-kinds.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	sample := string(text)
	r.sample(sample)
	if _, stderr, code := r.run(sample); code != 1 || !strings.Contains(stderr, "pod default/web exists") {
		t.Errorf("the same manifest again: got %q, exit code %d; want that the pod exists", stderr, code)
	}
	d.Kill()
	d.Start()
	r.removeAll()
	r.nothingLeft("rmp")

	r.refused(sample)
	r.failed()
	r.jobs()
}

// sample runs the sample and checks that each pod does what its manifest says.
func (r manifestRun) sample(manifest string) {
	r.Helper()
	stdout, stderr, code := r.run(manifest, "-o", "json")
	var list struct {
		Items []struct {
			ID, State, RuntimeHandler string
			Metadata                  struct{ Name string }
		}
	}
	if err := json.Unmarshal([]byte(stdout), &list); code != 0 || err != nil || len(list.Items) != 3 {
		r.Fatalf("run -f: got exit code %d, %v, %s\n%s\nwant three pods", code, err, stderr, stdout)
	}
	for i, want := range []string{"web linux", "greeter wasm", "machine vm"} {
		if p := list.Items[i]; p.Metadata.Name+" "+p.RuntimeHandler != want || p.State != "SANDBOX_READY" {
			r.Errorf("pod %d: got %+v, want %s", i, p, want)
		}
	}
	resp, err := r.d.Runtime().PodSandboxStatus(r.Context(), list.Items[0].ID, false)
	if err != nil {
		r.Fatal(err)
	}
	ip := resp.GetStatus().GetNetwork().GetIp()
	if got, want := r.get(ip, "/"), "Hello from web at "+ip+"\n"; got != want {
		r.Errorf("page: got %q, want %q", got, want)
	}
	first := r.get(ip, "/now")
	until.Holds(r.T, "the sidecar writes", func() bool { return r.get(ip, "/now") != first })
	server, err := tripod(r.T, r.d, "ps", "--name", "server", "-q").Output()
	if err != nil {
		r.Fatal(err)
	}
	hosts, _, err := r.d.Runtime().ExecSync(r.Context(), strings.TrimSpace(string(server)), []string{"cat", "/etc/hosts"}, 0)
	if err != nil || !strings.Contains(string(hosts), ip+"\tweb\n192.0.2.7\tdatabase\n") {
		r.Errorf("/etc/hosts: got %v, %s; want the pod and its alias", err, hosts)
	}
	if out, err := tripod(r.T, r.d, "ps", "--name", "machine", "-q").CombinedOutput(); err != nil || len(out) == 0 {
		r.Errorf("running machine: got %v, %s", err, out)
	}
}

func (r manifestRun) get(ip, path string) string {
	r.Helper()
	resp, err := http.Get(fmt.Sprintf("http://%s:8080%s", ip, path))
	if err != nil {
		r.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.Fatal(err)
	}
	return string(body)
}

// refused: every unsupported field is named, and nothing is made.
func (r manifestRun) refused(manifest string) {
	r.Helper()
	manifest = strings.Replace(manifest, "emptyDir: {}", "nfs: {server: s, path: /}", 1)
	manifest = strings.Replace(manifest, "spec:\n  runtimeClassName: vm",
		"spec:\n  dnsPolicy: ClusterFirstWithHostNet\n  runtimeClassName: vm", 1)
	_, stderr, code := r.run(manifest)
	for _, want := range []string{"pod default/web: spec.volumes[0].nfs: Forbidden",
		"pod default/machine: spec.dnsPolicy: Unsupported value"} {
		if code != 1 || !strings.Contains(stderr, want) {
			r.Errorf("unsupported fields: got exit code %d and %q, want %q", code, stderr, want)
		}
	}
	r.nothingLeft("a refused manifest")
}

// job returns a pod whose init container and container run these commands, beside a sidecar.
func job(name, init, main string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 3
  volumes: [{name: v, emptyDir: {}}]
  initContainers:
  - {name: side, image: %[2]q, restartPolicy: Always, command: [sh, -c, "trap 'echo ended >/v/side; exit 0' TERM; sleep 600 & wait"], volumeMounts: [{name: v, mountPath: /v}]}
  - {name: init, image: %[2]q, command: [sh, -c, %[3]q], volumeMounts: [{name: v, mountPath: /v}]}
  containers:
  - {name: main, image: %[2]q, command: [sh, -c, %[4]q], volumeMounts: [{name: v, mountPath: /v}]}
`, name, harness.Busybox, init, main)
}

// failed: if a step fails, the pods before it are removed as well, and the error names the step.
func (r manifestRun) failed() {
	r.Helper()
	first := job("first", "true", "sleep 600") + "\n---\n"
	for _, c := range []struct{ manifest, want, timeout string }{
		{first + job("second", "exit 7", "true"), "pod default/second: init: the init container has failed: exit code 7", "1m"},
		{first + job("second", "true", "true") + "  runtimeClassName: none\n", `runtime_handler: no runtime for handler "none"`, "1m"},
		{first + strings.Replace(job("second", "true", "true"), "[sh, -c, \"true\"], volumeMounts: [{name: v, mountPath: /v}]}\n  containers",
			"[/none]}\n  containers", 1),
			"pod default/second: init: StartContainer: ", "1m"},
		{job("second", "sleep 600", "true"), "pod default/second: init: the init container has not ended after 100ms (--init-timeout)", "100ms"},
	} {
		_, stderr, code := r.run(c.manifest, "--init-timeout", c.timeout)
		if code != 1 || !strings.Contains(stderr, c.want) {
			r.Errorf("a step fails: got exit code %d and %q, want %q", code, stderr, c.want)
		}
		r.nothingLeft("a failed step")
	}
}

// jobs: --rm waits for the containers, ends the sidecars, removes everything, and has the exit code of a container that
// failed.
func (r manifestRun) jobs() {
	r.Helper()
	host := r.TempDir()
	manifest := job("good", "echo 1 >/v/a", "test $(cat /v/a) = 1") + "\n---\n" + job("bad", "true", "exit 3")
	manifest = strings.Replace(manifest, "emptyDir: {}", "hostPath: {path: "+host+"}", 1)
	_, stderr, code := r.run(manifest, "--rm")
	if code != 3 || !strings.Contains(stderr, "pod default/bad: container main has failed: exit code 3") {
		r.Errorf("jobs: got exit code %d and %q, want 3 from the second", code, stderr)
	}
	if text, err := os.ReadFile(filepath.Join(host, "side")); string(text) != "ended\n" {
		r.Errorf("the sidecar's file: got %q, %v; want that it was asked to end", text, err)
	}
	r.nothingLeft("--rm")
}

// TestRunFromKubectl: `run -f` runs what `kubectl run` and `kubectl get` print, and names the fields without an effect in
// one line. A group without a user goes with the user of the image.
func TestRunFromKubectl(t *testing.T) {
	r := manifestRun{t, harness.StartDaemon(t), filepath.Join(t.TempDir(), "volumes")}
	const byName = harness.ImagePrefix + "k8s-staging-cri-tools/test-image-user-username"
	const byID = harness.ImagePrefix + "k8s-staging-cri-tools/test-image-user-uid-group"
	const fewIgnored = "spec.dnsPolicy: ClusterFirst, spec.restartPolicy: Always\n"
	for _, c := range []struct{ format, script, image, security, ignored string }{
		{printedByRun, "test $(id -u):$(id -g) = 0:0", harness.Busybox, "{}", fewIgnored},
		{printedByRun, `test "$(id -u) $(id -G)" = "0 7 9"`, harness.Busybox, "{runAsGroup: 7, supplementalGroups: [9]}", fewIgnored},
		{printedByRun, "test $(id -un):$(id -g) = www-data:7", byName, "{runAsGroup: 7}", fewIgnored},
		{printedByRun, "test $(id -u):$(id -g) = 1003:7", byID, "{runAsGroup: 7, runAsNonRoot: true}", fewIgnored},
		{printedByGet, "test ! -e /var/run/secrets", harness.Busybox, "{}",
			"metadata.creationTimestamp, metadata.resourceVersion, metadata.uid, " +
				"spec.containers[].terminationMessagePath: /dev/termination-log, spec.containers[].terminationMessagePolicy: File, " +
				"spec.dnsPolicy: ClusterFirst, spec.enableServiceLinks, spec.nodeName, spec.preemptionPolicy: PreemptLowerPriority, spec.priority, " +
				"spec.restartPolicy: Always, spec.schedulerName, spec.serviceAccount: default, spec.serviceAccountName: default, spec.tolerations, " +
				"spec.volumes[].projected, status\n"},
	} {
		stdout, stderr, code := r.run(fmt.Sprintf(c.format, c.script, c.image, c.security), "--rm")
		want := "tripod run: warning: pod default/web: no effect without a cluster: " + c.ignored
		if code != 0 || !strings.Contains(stderr, want) || strings.Count(stderr, "warning") != 1 {
			t.Errorf("%s as %s in %s: got exit code %d, %q and %q; want 0 and one warning %q", c.script, c.security, c.image, code, stdout, stderr,
				want)
		}
		r.nothingLeft("--rm")
	}
}

// printedByRun is what `kubectl run web --image=IMAGE --dry-run=client -o yaml --command -- sh -c SCRIPT` prints, with a
// security context.
const printedByRun = `apiVersion: v1
kind: Pod
metadata:
  creationTimestamp: null
  labels:
    run: web
  name: web
spec:
  containers:
  - command:
    - sh
    - -c
    - %q
    image: %s
    name: web
    resources: {}
  dnsPolicy: ClusterFirst
  restartPolicy: Always
  securityContext: %s
status: {}
`

// printedByGet is what `kubectl get pod web -o yaml` prints for such a pod.
const printedByGet = `apiVersion: v1
kind: Pod
metadata:
  creationTimestamp: "2026-11-20T08:00:00Z"
  labels:
    run: web
  name: web
  namespace: default
  resourceVersion: "4711"
  uid: b5a69788-7766-4544-a332-211000f1e2d3
spec:
  containers:
  - command:
    - sh
    - -c
    - %q
    image: %s
    imagePullPolicy: IfNotPresent
    name: web
    resources: {}
    terminationMessagePath: /dev/termination-log
    terminationMessagePolicy: File
    volumeMounts:
    - mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      name: kube-api-access-x7k2p
      readOnly: true
  dnsPolicy: ClusterFirst
  enableServiceLinks: true
  nodeName: worker-1
  preemptionPolicy: PreemptLowerPriority
  priority: 0
  restartPolicy: Always
  schedulerName: default-scheduler
  securityContext: %s
  serviceAccount: default
  serviceAccountName: default
  terminationGracePeriodSeconds: 30
  tolerations:
  - effect: NoExecute
    key: node.kubernetes.io/not-ready
    operator: Exists
    tolerationSeconds: 300
  volumes:
  - name: kube-api-access-x7k2p
    projected:
      defaultMode: 420
      sources:
      - serviceAccountToken:
          expirationSeconds: 3607
          path: token
      - configMap:
          items:
          - key: ca.crt
            path: ca.crt
          name: kube-root-ca.crt
      - downwardAPI:
          items:
          - fieldRef:
              apiVersion: v1
              fieldPath: metadata.namespace
            path: namespace
status:
  phase: Running
  qosClass: BestEffort
`
