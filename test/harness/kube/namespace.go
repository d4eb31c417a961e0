package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/until"
)

// Timeout bounds each action of the cluster, except the boot of a machine.
const Timeout = 90 * time.Second

// Namespace is a namespace for one test. It is deleted when the test ends. The test fails if a container was restarted
// unexpectedly, or if anything that belongs to its pods is left on the node.
type Namespace struct {
	Name    string
	Cluster *Cluster

	t        testing.TB
	restarts bool
}

var namespaces atomic.Int32

// notInNames matches characters that are not allowed in the name of a namespace.
var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// Namespace creates a namespace for a test.
func (c *Cluster) Namespace(t testing.TB) *Namespace {
	t.Helper()
	name := strings.Trim(notInNames.ReplaceAllString(strings.ToLower(strings.TrimPrefix(t.Name(), "Test")), "-"), "-")
	n := &Namespace{Name: fmt.Sprintf("%.40s-%d", name, namespaces.Add(1)), Cluster: c, t: t}
	if _, err := c.Kubectl("", "create", "namespace", n.Name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.cleanUp)
	// The API server refuses pods until the namespace has its service account.
	n.Await("service account of the namespace", Timeout, func() error {
		return c.Get(n.path("serviceaccounts/default"), &corev1.ServiceAccount{})
	})
	return n
}

// ExpectRestarts allows restarts of the namespace's containers.
func (n *Namespace) ExpectRestarts() { n.restarts = true }

func (n *Namespace) path(rest string) string { return "/api/v1/namespaces/" + n.Name + "/" + rest }

// Await waits until cond returns nil. After the timeout it fails the test with the last error.
func (n *Namespace) Await(what string, timeout time.Duration, cond func() error) {
	n.t.Helper()
	if err := until.Poll(timeout, cond); err != nil {
		n.t.Fatalf("%s: not within %v: %v", what, timeout, err)
	}
}

// Kubectl runs kubectl in the namespace and returns its output. It fails the test on error.
func (n *Namespace) Kubectl(args ...string) string {
	n.t.Helper()
	out, err := n.TryKubectl(args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// TryKubectl runs kubectl in the namespace and returns its output.
func (n *Namespace) TryKubectl(args ...string) (string, error) { return n.KubectlInput("", args...) }

// KubectlInput runs kubectl in the namespace with standard input.
func (n *Namespace) KubectlInput(stdin string, args ...string) (string, error) {
	return n.Cluster.Kubectl(stdin, append([]string{"--namespace", n.Name}, args...)...)
}

// KubectlCommand returns a command, not started yet, that runs kubectl in the namespace.
func (n *Namespace) KubectlCommand(args ...string) *exec.Cmd {
	return n.Cluster.KubectlCommand(append([]string{"--namespace", n.Name}, args...)...)
}

// Apply applies objects in YAML.
func (n *Namespace) Apply(yaml string) {
	n.t.Helper()
	if _, err := n.KubectlInput(yaml, "apply", "-f", "-"); err != nil {
		n.t.Fatalf("%v\n%s", err, yaml)
	}
}

// Get reads an object of the namespace: "pods/web", or "apis/apps/v1:deployments/web" for other API groups.
func (n *Namespace) Get(object string, into any) error {
	group, rest, ok := strings.Cut(object, ":")
	if !ok {
		return n.Cluster.Get(n.path(object), into)
	}
	return n.Cluster.Get("/"+group+"/namespaces/"+n.Name+"/"+rest, into)
}

// Pod returns a pod, which must exist.
func (n *Namespace) Pod(name string) *corev1.Pod {
	n.t.Helper()
	var pod corev1.Pod
	if err := n.Get("pods/"+name, &pod); err != nil {
		n.t.Fatal(err)
	}
	return &pod
}

// Pods returns the pods that match a label selector; "" selects all.
func (n *Namespace) Pods(selector string) []corev1.Pod {
	n.t.Helper()
	pods, err := n.pods(selector)
	if err != nil {
		n.t.Fatal(err)
	}
	return pods
}

func (n *Namespace) pods(selector string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := n.Get("pods?labelSelector="+selector, &list)
	return list.Items, err
}

// WaitPod waits until cond holds for a pod, and returns the pod in that state.
func (n *Namespace) WaitPod(name, what string, timeout time.Duration, cond func(*corev1.Pod) bool) *corev1.Pod {
	n.t.Helper()
	var pod corev1.Pod
	n.Await("pod "+name+" "+what, timeout, func() error {
		pod = corev1.Pod{}
		if err := n.Get("pods/"+name, &pod); err != nil {
			return err
		}
		if !cond(&pod) {
			return errors.New(Describe(&pod))
		}
		return nil
	})
	return &pod
}

// WaitReady waits until a pod is ready.
func (n *Namespace) WaitReady(name string, timeout time.Duration) *corev1.Pod {
	n.t.Helper()
	return n.WaitPod(name, "is ready", timeout, Ready)
}

// WaitPhase waits until a pod is in the phase.
func (n *Namespace) WaitPhase(name string, phase corev1.PodPhase, timeout time.Duration) *corev1.Pod {
	n.t.Helper()
	return n.WaitPod(name, "is "+string(phase), timeout, func(p *corev1.Pod) bool { return p.Status.Phase == phase })
}

// WaitPods waits until exactly the given number of pods match the selector and all of them are ready. It returns these
// pods.
func (n *Namespace) WaitPods(selector string, count int, timeout time.Duration) []corev1.Pod {
	n.t.Helper()
	var pods []corev1.Pod
	n.Await(fmt.Sprintf("%d ready pods of %s", count, selector), timeout, func() error {
		var err error
		if pods, err = n.pods(selector); err != nil {
			return err
		}
		if len(pods) != count || slices.ContainsFunc(pods, func(p corev1.Pod) bool { return !Ready(&p) }) {
			return errors.New(describeAll(pods))
		}
		return nil
	})
	return pods
}

// WaitGone waits until an object no longer exists.
func (n *Namespace) WaitGone(object string, timeout time.Duration) {
	n.t.Helper()
	n.Await(object+" is gone", timeout, func() error {
		var any json.RawMessage
		if err := n.Get(object, &any); err == nil {
			return errors.New("it still exists")
		} else if !isNotFound(err) {
			return err
		}
		return nil
	})
}

func isNotFound(err error) bool {
	return err != nil && strings.Contains(err.Error(), fmt.Sprint(": ", http.StatusNotFound, " "))
}

// WaitLog waits until the output of `kubectl logs`, with the given arguments, contains the text. It returns the output.
func (n *Namespace) WaitLog(text string, timeout time.Duration, args ...string) string {
	n.t.Helper()
	var log string
	n.Await(fmt.Sprintf("%q in the log of %v", text, args), timeout, func() error {
		var err error
		if log, err = n.TryKubectl(append([]string{"logs"}, args...)...); err == nil && !strings.Contains(log, text) {
			err = fmt.Errorf("the log is: %s", log)
		}
		return err
	})
	return log
}

// Ready reports whether a pod is ready and not being deleted.
func Ready(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// Describe describes a pod's status in one line.
func Describe(p *corev1.Pod) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s is %s", p.Name, p.Status.Phase)
	if p.DeletionTimestamp != nil {
		b.WriteString(", being deleted")
	}
	if p.Status.Reason != "" {
		fmt.Fprintf(&b, ", %s (%s)", p.Status.Reason, p.Status.Message)
	}
	for _, s := range containerStatuses(p) {
		fmt.Fprintf(&b, "; %s: ", s.Name)
		switch {
		case s.State.Waiting != nil:
			fmt.Fprintf(&b, "waits, %s (%s)", s.State.Waiting.Reason, s.State.Waiting.Message)
		case s.State.Running != nil:
			fmt.Fprintf(&b, "runs, ready %v", s.Ready)
		case s.State.Terminated != nil:
			fmt.Fprintf(&b, "ended with %d, %s (%s)", s.State.Terminated.ExitCode, s.State.Terminated.Reason, s.State.Terminated.Message)
		}
		if s.RestartCount > 0 {
			fmt.Fprintf(&b, ", %d restarts", s.RestartCount)
		}
	}
	return b.String()
}

func describeAll(pods []corev1.Pod) string {
	lines := []string{fmt.Sprintf("%d pods", len(pods))}
	for i := range pods {
		lines = append(lines, Describe(&pods[i]))
	}
	return strings.Join(lines, "\n\t")
}

func containerStatuses(p *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses, p.Status.EphemeralContainerStatuses)
}

func (n *Namespace) cleanUp() {
	if !n.restarts {
		n.CheckRestarts()
	}
	if n.t.Failed() {
		n.explain()
	}
	uids := n.podUIDs()
	// Delete the controllers too, because they would create new pods. The namespace itself takes about 15 s to go away.
	n.Kubectl("delete", "deployments,statefulsets,daemonsets,jobs,cronjobs,pods", "--all", "--wait=false")
	n.Kubectl("delete", "namespace", n.Name, "--wait=false")
	if err := until.Poll(Timeout, n.noPods); err != nil {
		n.t.Errorf("the pods still exist after %v: %v", Timeout, err)
		n.explain()
		n.Kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
	}
	if err := until.Poll(30*time.Second, func() error { return n.nodeLeaks(uids) }); err != nil {
		n.t.Errorf("left on a node: %v", err)
	}
}

// noPods returns nil if the namespace has no pods.
func (n *Namespace) noPods() error {
	pods, err := n.pods("")
	if err == nil && len(pods) > 0 {
		err = errors.New(describeAll(pods))
	}
	return err
}

// CheckRestarts fails the test if a container of the namespace was restarted.
func (n *Namespace) CheckRestarts() {
	pods, err := n.pods("")
	if err != nil {
		n.t.Error(err)
	}
	for i := range pods {
		for _, s := range containerStatuses(&pods[i]) {
			if s.RestartCount > 0 {
				n.t.Errorf("a container was restarted unexpectedly: %s", Describe(&pods[i]))
			}
		}
	}
}

// podUIDs returns the UIDs of all pods that ever existed in the namespace. It finds them in the events: each pod has at
// least one event, from its scheduling.
func (n *Namespace) podUIDs() []string {
	var events corev1.EventList
	if err := n.Get("events", &events); err != nil {
		n.t.Error(err)
	}
	var uids []string
	for _, e := range events.Items {
		if e.InvolvedObject.Kind == "Pod" && e.InvolvedObject.UID != "" {
			uids = append(uids, string(e.InvolvedObject.UID))
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids)
}

// nodeLeaks returns an error that names what the namespace's pods have left on the nodes.
func (n *Namespace) nodeLeaks(uids []string) error {
	var errs []error
	for _, node := range n.Cluster.Nodes {
		if err := node.podLeaks(n.Name, uids); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", node.Name, err))
		}
	}
	return errors.Join(errs...)
}

// explain logs the state of the namespace and the node for a failed test.
func (n *Namespace) explain() {
	pods, err := n.pods("")
	n.t.Logf("pods: %s %v", describeAll(pods), err)
	events, err := n.TryKubectl("get", "events", "--sort-by=.lastTimestamp",
		"-o=custom-columns=COUNT:.count,OBJECT:.involvedObject.name,REASON:.reason,MESSAGE:.message")
	n.t.Logf("events: %v\n%s", err, events)
	for i := range pods {
		for _, s := range containerStatuses(&pods[i]) {
			log, err := n.TryKubectl("logs", pods[i].Name, "--container", s.Name, "--tail=20")
			n.t.Logf("log of %s in %s: %v\n%s", s.Name, pods[i].Name, err, log)
			if s.RestartCount > 0 {
				log, err := n.TryKubectl("logs", pods[i].Name, "--container", s.Name, "--tail=20", "--previous")
				n.t.Logf("log of %s in %s before its restart: %v\n%s", s.Name, pods[i].Name, err, log)
			}
		}
	}
	for _, node := range n.Cluster.Nodes {
		for _, list := range []string{"pods", "ps"} {
			out, err := node.Tripod(list)
			n.t.Logf("tripod %s on %s: %v\n%s", list, node.Name, err, out)
		}
		for _, p := range []*Process{node.Kubelet, node.Daemon} {
			n.t.Logf("lines in the log of %s on %s with %s:\n%s", p.Name, node.Name, n.Name, p.Grep(n.Name, 40))
		}
	}
}
