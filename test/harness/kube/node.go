package kube

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/until"
)

// Node is a node of a cluster. The first one uses the test's own namespaces, every other one has namespaces of its own
// and can be killed.
type Node struct {
	// Name and IP are the node's name and address. Dir is the directory of its files, which is like its disk: it outlives
	// the node's namespaces.
	Name, IP, Dir string
	// Programs of the node. Flannel is nil in a cluster of one node.
	Daemon, Kubelet, Proxy, Flannel *Process

	cluster *Cluster
	own     *testns.Nested // nil for the first node
	kubelet map[string]any // the kubelet's configuration
	before  harness.Resources
}

func (n *Node) path(name string) string { return filepath.Join(n.Dir, name) }

// do calls a function in the node's namespaces; see testns.Nested.
func (n *Node) do(call func() error) error {
	if n.own == nil {
		return call()
	}
	return n.own.Do(call)
}

// prepare sets up the files, namespaces and kernel objects that the node's programs need.
func (n *Node) prepare() error {
	tripod, err := harness.Binary()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(n.Dir, 0o755); err != nil {
		return err
	}
	n.defineProcesses(tripod)
	if n.cluster.flannel() {
		if err := n.defineFlannel(); err != nil {
			return err
		}
	}
	if harness.Installed() {
		return errors.Join(n.addLink(), n.writeKubeletConfig())
	}
	return errors.Join(n.prepareHost(), n.writeDaemonConfig(), n.writeKubeletConfig())
}

// snapshot returns the resources in the node's namespaces.
func (n *Node) snapshot() (r harness.Resources, err error) {
	if harness.Installed() {
		return r, nil // the host has others' things too: test/host compares what is ours
	}
	err = n.do(func() error {
		r = harness.Snapshot(nil)
		return nil
	})
	if n.own == nil {
		maps.DeleteFunc(r.Processes, n.cluster.runsElsewhere)
	}
	return r, err
}

// programs returns the node's programs in the order of their start.
func (n *Node) programs() []*Process {
	all := []*Process{n.Daemon, n.Flannel, n.Kubelet, n.Proxy}
	return slices.DeleteFunc(all, func(p *Process) bool { return p == nil })
}

func (n *Node) start() error {
	for _, p := range n.programs() {
		if err := p.Start(); err != nil {
			return err
		}
	}
	return nil
}

// awaitReady waits until the node accepts pods and gives them addresses of its pod CIDR.
func (n *Node) awaitReady() error {
	if n.Flannel != nil {
		if err := n.await(n.Flannel, "has a subnet for the node's pods", n.writeNetwork); err != nil {
			return err
		}
		return n.await(n.Kubelet, "has a ready node", n.NodeReady)
	}
	return errors.Join(n.await(n.Kubelet, "has a ready node", n.NodeReady),
		n.await(n.Kubelet, "passes the pod CIDR to the runtime", n.podCIDRPassed))
}

// podCIDRPassed returns nil if the kubelet has passed the pod CIDR to the runtime. Until then, pods would get addresses
// from the runtime's own range.
func (n *Node) podCIDRPassed() error {
	if n.Kubelet.Grep("newPodCIDR=", 1) == "" {
		return errors.New("its log does not mention newPodCIDR")
	}
	return nil
}

// await waits for a condition of a program. It fails early if the program has ended.
func (n *Node) await(p *Process, what string, cond func() error) error {
	err := until.Poll(readyTimeout, func() error {
		if failures := p.failures(); len(failures) > 0 {
			return nil
		}
		return cond()
	})
	if failures := p.failures(); len(failures) > 0 {
		err = errors.New(strings.Join(failures, "; "))
	}
	if err != nil {
		return fmt.Errorf("%s: %[2]s %[4]s: not within %[3]v: %[5]w\n%[6]s", n.Name, p.Name, readyTimeout, what, err, p.Tail(30))
	}
	return nil
}

// WaitRuntime waits until the daemon answers, for example after a restart.
func (n *Node) WaitRuntime() error {
	return n.await(n.Daemon, "answers", func() error {
		_, err := n.Tripod("info")
		return err
	})
}

// NodeReady returns nil if the node is ready and has no taints.
func (n *Node) NodeReady() error {
	var node corev1.Node
	if err := n.cluster.Get("/api/v1/nodes/"+n.Name, &node); err != nil {
		return err
	}
	ready := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	if !ready {
		return fmt.Errorf("the node is not ready: %+v", node.Status.Conditions)
	}
	if len(node.Spec.Taints) > 0 {
		return fmt.Errorf("the node has taints: %v", node.Spec.Taints)
	}
	return nil
}

// Tripod runs the tripod command against the node's daemon.
func (n *Node) Tripod(args ...string) (string, error) {
	bin, err := harness.Binary()
	if err != nil {
		return "", err
	}
	return n.Run(bin, args...)
}

// Run runs a program on the node and returns its output.
func (n *Node) Run(program string, args ...string) (out string, err error) {
	err = n.do(func() error {
		out, err = output(exec.Command(program, args...))
		return err
	})
	return out, err
}

// RestartKubelet stops the kubelet and starts it with its original configuration and the given changes.
func (n *Node) RestartKubelet(change ...map[string]any) error {
	return errors.Join(n.Kubelet.Stop(), n.writeKubeletConfig(change...), n.Kubelet.Start())
}

// RestartDaemon stops the daemon and starts it with its original configuration and the given changes to sections.
func (n *Node) RestartDaemon(change ...map[string]map[string]any) error {
	return errors.Join(n.Daemon.Stop(), n.writeDaemonConfig(change...), n.Daemon.Start(), n.WaitRuntime())
}

// Kill kills all processes of the node at once and removes its namespaces, as a loss of power would. Its files stay.
func (n *Node) Kill() error {
	for _, p := range n.programs() {
		p.expectEnd()
	}
	err := n.own.Kill()
	for _, p := range n.programs() {
		err = errors.Join(err, p.Kill())
	}
	return err
}

// Boot starts the killed node again, in new namespaces, and waits until it is ready. Pods wait until flannel has the
// node's subnet, because its CNI plugin would refuse them.
func (n *Node) Boot() error {
	if err := errors.Join(os.RemoveAll(n.path("net.d")), testns.RemoveCgroup(n.cgroup()), n.nest(), n.prepareHost()); err != nil {
		return fmt.Errorf("prepare %s: %w", n.Name, err)
	}
	// A process cannot outlive the node, but everything else that the killed one left still counts as a leak.
	now, err := n.snapshot()
	if err != nil {
		return err
	}
	n.before.Processes = now.Processes
	return errors.Join(n.start(), n.awaitReady())
}

// nest makes the node's namespaces. The file "pid" has the process ID of their first process, for hack/kube.sh.
func (n *Node) nest() (err error) {
	if n.own, err = testns.Nest(); err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(n.Dir, 0o755), os.WriteFile(n.path("pid"), []byte(strconv.Itoa(n.own.Pid())), 0o644))
}

// drained returns nil if the node has no pods and no logs of pods.
func (n *Node) drained() error {
	pods, err := n.Sandboxes()
	if err == nil && len(pods) > 0 {
		err = fmt.Errorf("%s: %d pods are still on the node: %+v", n.Name, len(pods), pods)
	}
	dir := n.path("log")
	if harness.Installed() {
		dir = "/var/log"
	}
	logs, _ := filepath.Glob(dir + "/pods/*")
	if len(logs) > 0 {
		err = errors.Join(err, fmt.Errorf("%s: logs are still on the node: %v", n.Name, logs))
	}
	return err
}

// leaks returns an error that names what the node has left in its namespaces and cgroups. Its programs must have ended.
func (n *Node) leaks() error {
	return until.Poll(5*time.Second, func() error {
		after, err := n.snapshot()
		maps.DeleteFunc(after.Mounts, func(name string, _ int) bool {
			// These mounts of the daemon exist while the node is up, so they are not leaks.
			return strings.HasPrefix(name, "/run/tripod ") || strings.HasPrefix(name, "/run/tripod/netns ")
		})
		return errors.Join(err, n.before.Leaks(after))
	})
}

// podLeaks returns an error that names what the pods of a namespace, with the given UIDs, have left on the node: running
// sandboxes, cgroups, volumes and mounts. Stopped sandboxes and logs may remain for up to a minute, the kubelet's
// cleanup interval.
func (n *Node) podLeaks(namespace string, uids []string) error {
	pods, err := n.Sandboxes()
	errs := []error{err}
	for _, p := range pods {
		if p.Metadata.Namespace == namespace && p.State == "SANDBOX_READY" {
			errs = append(errs, fmt.Errorf("pod %s is still running", p.Metadata.Name))
		}
	}
	mounts, err := n.Run("cat", "/proc/self/mountinfo")
	errs = append(errs, err)
	for _, uid := range uids {
		for line := range strings.Lines(mounts) {
			if strings.Contains(line, uid) {
				errs = append(errs, fmt.Errorf("mount: %s", strings.TrimSpace(line)))
			}
		}
		patterns := []string{n.path("kubelet/pods/" + uid)}
		if harness.Installed() {
			errs = append(errs, unitLeaks(uid))
			patterns = append(patterns, "/sys/fs/cgroup/kubepods.slice/*"+unitName(uid)+".slice",
				"/sys/fs/cgroup/kubepods.slice/*/*"+unitName(uid)+".slice")
		}
		for _, root := range testns.CgroupRoots() {
			patterns = append(patterns, root+n.kubeCgroup()+"/kubepods/pod"+uid, root+n.kubeCgroup()+"/kubepods/*/pod"+uid)
		}
		for _, pattern := range patterns {
			found, _ := filepath.Glob(pattern)
			for _, path := range found {
				errs = append(errs, errors.New(path))
			}
		}
	}
	return errors.Join(errs...)
}
