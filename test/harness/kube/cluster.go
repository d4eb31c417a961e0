package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// Names and addresses. 192.0.2.0/24 is reserved for documentation, so it is not in use. NodeName and NodeIP are those
// of the first node, on which the programs run that control the cluster.
const (
	NodeName = "node1"
	NodeIP   = "192.0.2.10"

	PodCIDR      = "10.244.0.0/16"
	ServiceCIDR  = "10.96.0.0/16"
	apiServiceIP = "10.96.0.1"  // the address of the Service kubernetes
	dnsServiceIP = "10.96.0.10" // the address of the Service kube-dns

	serverURL = "https://" + NodeIP + ":6443"
	etcdURL   = "http://127.0.0.1:2379"
)

var gateway = net.IPv4(192, 0, 2, 1)

// readyTimeout bounds the start of a program or the node on a busy host.
const readyTimeout = 2 * time.Minute

// Cluster is a cluster of one or more nodes.
type Cluster struct {
	// Node is the first node. The directory of its files is also the cluster's.
	*Node
	// Nodes are all nodes.
	Nodes []*Node
	// Programs of the cluster, which run on the first node, in the order of their start.
	Etcd, APIServer, ControllerManager, Scheduler *Process

	programs string // the directory of Kubernetes' programs
	addons   string // the directory of the programs of a cluster with several nodes
	identity identity
	api      *http.Client
}

// Programs returns the directory of Kubernetes' programs. It returns an error if a program is missing. If the set "e2e"
// of hack/kube.sh is given, the programs of that set must exist too; for "cluster" and "metrics" it returns the directory
// of that set. For "kubeadm", only kubeadm must exist.
func Programs(set ...string) (string, error) {
	c := exec.Command(filepath.Join(harness.Root(), "hack", "kube.sh"), append([]string{"check"}, set...)...)
	out, err := c.CombinedOutput()
	if err != nil {
		return "", errors.New(strings.TrimSpace(string(out)))
	}
	return strings.TrimSpace(string(out)), nil
}

// Start starts a cluster with the given number of nodes and returns when they are ready. A world can have only one
// cluster. On error, nothing is left running.
func Start(nodes int) (*Cluster, error) {
	programs, err := Programs()
	if err != nil {
		return nil, err
	}
	c := &Cluster{programs: programs}
	if nodes > 1 {
		if c.addons, err = Programs("cluster"); err != nil {
			return nil, err
		}
	}
	for i := range nodes {
		n := &Node{
			Name: fmt.Sprint("node", i+1), IP: fmt.Sprint("192.0.2.", 10+i),
			Dir: filepath.Join(harness.Dir(), "cluster"), cluster: c,
		}
		if i > 0 {
			n.Dir = filepath.Join(n.Dir, n.Name)
		}
		c.Nodes = append(c.Nodes, n)
	}
	c.Node = c.Nodes[0]
	if err := c.prepare(); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the nodes: %w", err), c.end())
	}
	if err := c.start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the cluster: %w", err), c.Stop())
	}
	return c, nil
}

// prepare sets up the files and kernel objects that the programs need.
func (c *Cluster) prepare() (err error) {
	if c.identity, err = newIdentity(c.path("pki"), c.Nodes); err != nil {
		return err
	}
	c.api = c.identity.client()
	c.defineControlPlane()
	for i, n := range c.Nodes {
		if i > 0 {
			if err := n.nest(); err != nil {
				return err
			}
		}
		if err := n.prepare(); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	for _, n := range c.Nodes {
		if n.before, err = n.snapshot(); err != nil {
			return err
		}
	}
	return nil
}

// runsElsewhere reports whether a process, "PID@STARTTIME COMMAND" in the first node's namespaces, runs in the PID
// namespace of another node, which is nested in the first node's.
func (c *Cluster) runsElsewhere(process string, _ int) bool {
	pid, _, _ := strings.Cut(process, "@")
	space, _ := os.Readlink("/proc/" + pid + "/ns/pid")
	return slices.ContainsFunc(c.Nodes, func(n *Node) bool {
		if n.own == nil {
			return false
		}
		nested, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", n.own.Pid()))
		return err == nil && nested == space
	})
}

// registryHosts returns the directory that makes the tests' registry the mirror of all registries, for every node.
func (c *Cluster) registryHosts() (string, error) {
	r, err := harness.OpenRegistry()
	if err != nil {
		return "", err
	}
	dir := c.path("certs.d")
	return dir, r.WriteHosts(dir, NodeIP)
}

func (c *Cluster) start() error {
	// The API server retries until etcd runs.
	if err := errors.Join(c.Etcd.Start(), c.APIServer.Start()); err != nil {
		return err
	}
	serverReady := func() error { _, err := c.read(context.Background(), "/readyz"); return err }
	if err := c.await(c.APIServer, "answers readyz", serverReady); err != nil {
		return err
	}
	if err := errors.Join(c.ControllerManager.Start(), c.Scheduler.Start(), c.applyRuntimeClasses()); err != nil {
		return err
	}
	if c.flannel() {
		if err := c.applyAddons(); err != nil {
			return err
		}
	}
	var errs []error
	for _, n := range c.Nodes {
		errs = append(errs, n.start())
	}
	for _, n := range c.Nodes {
		if err := errors.Join(errs...); err != nil {
			return err
		}
		errs = append(errs, n.awaitReady())
	}
	if c.flannel() {
		errs = append(errs, c.awaitDNS())
	}
	return errors.Join(errs...)
}

// flannel reports whether flannel connects the nodes. The only node of a cluster uses the network that the daemon has
// built in.
func (c *Cluster) flannel() bool { return len(c.Nodes) > 1 }

// Drain waits until the kubelets, which clean up once a minute, have removed the last pod and its logs from the nodes.
// The pods must already be deleted.
func (c *Cluster) Drain() error {
	var errs []error
	if c.flannel() {
		errs = append(errs, c.deleteAddons())
	}
	for _, n := range c.Nodes {
		errs = append(errs, until.Poll(readyTimeout, n.drained))
	}
	return errors.Join(errs...)
}

// Stop stops the cluster, clients before servers. Its error names programs that had already ended, or did not end in
// time.
func (c *Cluster) Stop() error { return errors.Join(c.stopPrograms(), c.end()) }

func (c *Cluster) stopPrograms() error {
	var clients, daemons []*Process
	for _, n := range c.Nodes {
		clients, daemons = append(clients, n.Proxy, n.Kubelet), append(daemons, n.Daemon)
		if n.Flannel != nil {
			clients = append(clients, n.Flannel)
		}
	}
	var errs []error
	for _, p := range slices.Concat(clients, []*Process{c.Scheduler, c.ControllerManager}, daemons, []*Process{c.APIServer, c.Etcd}) {
		errs = append(errs, p.Stop())
		for _, end := range p.failures() {
			errs = append(errs, fmt.Errorf("%s\n%s", end, p.Tail(30)))
		}
	}
	if !harness.Installed() {
		errs = append(errs, harness.EndCarriers("/run/tripod"))
	}
	return errors.Join(errs...)
}

// end removes the namespaces of the nodes that have their own, and the network interface on an installed host.
func (c *Cluster) end() error {
	var errs []error
	if harness.Installed() {
		errs = append(errs, removeLink())
	}
	for _, n := range c.Nodes {
		if n.own != nil {
			errs = append(errs, n.own.Kill())
		}
	}
	return errors.Join(errs...)
}

// Leaks returns an error that names what the nodes of a stopped cluster have left.
func (c *Cluster) Leaks() error {
	var errs []error
	for _, n := range c.Nodes {
		if err := n.leaks(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.Name, err))
		}
	}
	return errors.Join(errs...)
}
