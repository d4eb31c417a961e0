package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tripod-run/tripod/test/harness"

	"github.com/tripod-run/tripod/test/until"
)

// Name and addresses of the node. 192.0.2.0/24 is reserved for documentation, so it is not in use.
const (
	NodeName = "node1"
	NodeIP   = "192.0.2.10"

	PodCIDR      = "10.244.0.0/16"
	ServiceCIDR  = "10.96.0.0/16"
	apiServiceIP = "10.96.0.1" // the address of the Service kubernetes

	serverURL = "https://" + NodeIP + ":6443"
	etcdURL   = "http://127.0.0.1:2379"
)

var gateway = net.IPv4(192, 0, 2, 1)

// readyTimeout bounds the start of a program or the node on a busy host.
const readyTimeout = 2 * time.Minute

// Cluster is a cluster of one node.
type Cluster struct {
	// Dir is the directory of the cluster's files.
	Dir string
	// Programs of the cluster, in the order of their start.
	Etcd, APIServer, ControllerManager, Scheduler, Daemon, Kubelet, Proxy *Process

	programs string // the directory of Kubernetes' programs
	identity identity
	api      *http.Client
	kubelet  map[string]any // the kubelet's configuration
	before   harness.Resources
}

// Programs returns the directory of Kubernetes' programs. It returns an error if a program is missing. If the set "e2e"
// of hack/kube.sh is given, the programs of that set must exist too.
func Programs(set ...string) (string, error) {
	c := exec.Command(filepath.Join(harness.Root(), "hack", "kube.sh"), append([]string{"check"}, set...)...)
	out, err := c.CombinedOutput()
	if err != nil {
		return "", errors.New(strings.TrimSpace(string(out)))
	}
	return strings.TrimSpace(string(out)), nil
}

// Start starts the cluster and returns when its node is ready. A world can have only one cluster. On error, nothing is
// left running.
func Start() (*Cluster, error) {
	programs, err := Programs()
	if err != nil {
		return nil, err
	}
	c := &Cluster{Dir: filepath.Join(harness.Dir(), "cluster"), programs: programs}
	if err := c.prepare(); err != nil {
		return nil, fmt.Errorf("prepare the node: %w", err)
	}
	if err := c.start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the cluster: %w", err), c.Stop())
	}
	return c, nil
}

// prepare sets up the files and kernel objects that the programs need.
func (c *Cluster) prepare() error {
	if err := os.Mkdir(c.Dir, 0o755); err != nil {
		return err
	}
	registry, err := harness.OpenRegistry()
	if err != nil {
		return err
	}
	if c.identity, err = newIdentity(c.path("pki")); err != nil {
		return err
	}
	c.api = c.identity.client()
	tripod, err := harness.Binary()
	if err != nil {
		return err
	}
	c.defineProcesses(tripod)
	err = errors.Join(prepareNode(c.Dir), c.writeDaemonConfig(registry.HostsDir), c.writeKubeletConfig())
	c.before = harness.Snapshot(nil)
	return err
}

func (c *Cluster) path(name string) string { return filepath.Join(c.Dir, name) }

func (c *Cluster) start() error {
	if err := c.Etcd.Start(); err != nil {
		return err
	}
	// The API server retries until etcd runs; the daemon needs neither.
	if err := errors.Join(c.APIServer.Start(), c.Daemon.Start()); err != nil {
		return err
	}
	serverReady := func() error { _, err := c.read(context.Background(), "/readyz"); return err }
	if err := c.await(c.APIServer, "answers readyz", serverReady); err != nil {
		return err
	}
	for _, p := range []*Process{c.ControllerManager, c.Scheduler, c.Kubelet, c.Proxy} {
		if err := p.Start(); err != nil {
			return err
		}
	}
	if err := c.applyRuntimeClasses(); err != nil {
		return err
	}
	if err := c.await(c.Kubelet, "has a ready node", c.NodeReady); err != nil {
		return err
	}
	return c.await(c.Kubelet, "passes the pod CIDR to the runtime", c.podCIDRPassed)
}

// podCIDRPassed returns nil if the kubelet has passed the pod CIDR to the runtime. Until then, pods would get addresses
// from the runtime's own range.
func (c *Cluster) podCIDRPassed() error {
	if c.Kubelet.Grep("newPodCIDR=", 1) == "" {
		return errors.New("its log does not mention newPodCIDR")
	}
	return nil
}

// await waits for a condition of a program. It fails early if the program has ended.
func (c *Cluster) await(p *Process, what string, cond func() error) error {
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
		return fmt.Errorf("%[1]s %[3]s: not within %[2]v: %[4]w\n%[5]s", p.Name, readyTimeout, what, err, p.Tail(30))
	}
	return nil
}

// WaitRuntime waits until the daemon answers, for example after a restart.
func (c *Cluster) WaitRuntime() error {
	return c.await(c.Daemon, "answers", func() error {
		_, err := c.Tripod("info")
		return err
	})
}

// Drain waits until the kubelet, which cleans up once a minute, has removed the last pod and its logs from the node.
// The pods must already be deleted.
func (c *Cluster) Drain() error {
	return until.Poll(readyTimeout, func() error {
		pods, err := c.sandboxes()
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("%d pods are still on the node: %+v", len(pods), pods)
		}
		logs, _ := filepath.Glob("/var/log/pods/*")
		if len(logs) > 0 {
			err = errors.Join(err, fmt.Errorf("logs are still on the node: %v", logs))
		}
		return err
	})
}

// Stop stops the cluster, clients before servers. Its error names programs that had already ended, or did not end in
// time.
func (c *Cluster) Stop() error {
	var errs []error
	for _, p := range []*Process{c.Proxy, c.Kubelet, c.Scheduler, c.ControllerManager, c.Daemon, c.APIServer, c.Etcd} {
		errs = append(errs, p.Stop())
		for _, end := range p.failures() {
			errs = append(errs, fmt.Errorf("%s\n%s", end, p.Tail(30)))
		}
	}
	return errors.Join(append(errs, harness.EndCarriers("/run/tripod"))...)
}

// Leaks returns an error that names what a stopped cluster has left in the world.
func (c *Cluster) Leaks() error {
	return until.Poll(5*time.Second, func() error {
		after := harness.Snapshot(nil)
		maps.DeleteFunc(after.Mounts, func(name string, _ int) bool {
			// These mounts of the daemon exist while the node is up, so they are not leaks.
			return strings.HasPrefix(name, "/run/tripod ") || strings.HasPrefix(name, "/run/tripod/netns ")
		})
		return c.before.Leaks(after)
	})
}
