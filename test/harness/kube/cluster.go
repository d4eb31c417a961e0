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

// The node and its addresses. 192.0.2.0/24 is set aside for documentation, so that nothing else is there.
const (
	NodeName = "node1"
	NodeIP   = "192.0.2.10"

	PodCIDR      = "10.244.0.0/16"
	ServiceCIDR  = "10.96.0.0/16"
	apiServiceIP = "10.96.0.1" // that of the Service kubernetes

	serverURL = "https://" + NodeIP + ":6443"
	etcdURL   = "http://127.0.0.1:2379"
)

var gateway = net.IPv4(192, 0, 2, 1)

// readyTimeout is how long a program, or the node, may take to be ready on a busy machine.
const readyTimeout = 2 * time.Minute

// Cluster is a cluster of one node.
type Cluster struct {
	// Dir holds everything of the cluster that is on disk.
	Dir string
	// The programs, in the order in which they are started.
	Etcd, APIServer, ControllerManager, Scheduler, Daemon, Kubelet, Proxy *Process

	programs string // the directory of Kubernetes' programs
	identity identity
	api      *http.Client
	kubelet  map[string]any // the kubelet's configuration
	before   harness.Resources
}

// Programs is the directory with the programs of Kubernetes, and an error when one is missing, of the set e2e of hack/kube.sh
// as well if that is named.
func Programs(set ...string) (string, error) {
	c := exec.Command(filepath.Join(harness.Root(), "hack", "kube.sh"), append([]string{"check"}, set...)...)
	out, err := c.CombinedOutput()
	if err != nil {
		return "", errors.New(strings.TrimSpace(string(out)))
	}
	return strings.TrimSpace(string(out)), nil
}

// Start starts a cluster in this world, one per world, and returns when its node is ready. After an error nothing of it
// runs any more.
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

// prepare makes all that the programs find on disk and in the kernel.
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
	c.define(tripod)
	err = errors.Join(prepareNode(c.Dir), c.writeDaemonConfig(registry.HostsDir), c.writeKubeletConfig())
	c.before = harness.Snapshot(nil)
	return err
}

func (c *Cluster) path(name string) string { return filepath.Join(c.Dir, name) }

func (c *Cluster) start() error {
	if err := c.Etcd.Start(); err != nil {
		return err
	}
	// The API server tries again until etcd is there, and the daemon needs neither.
	if err := errors.Join(c.APIServer.Start(), c.Daemon.Start()); err != nil {
		return err
	}
	if err := c.await(c.APIServer, "answers readyz", c.serverReady); err != nil {
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
	if err := c.await(c.Kubelet, "has a node that is ready", c.NodeReady); err != nil {
		return err
	}
	return c.await(c.Kubelet, "passes the pod CIDR on", c.knowsPodCIDR)
}

// knowsPodCIDR is nil when the kubelet has passed the pods' address range to the runtime. Earlier pods get them from
// the runtime's own range.
func (c *Cluster) knowsPodCIDR() error {
	if c.Kubelet.Grep("newPodCIDR=", 1) == "" {
		return errors.New("its log does not say so")
	}
	return nil
}

// await waits for a condition of a program.
func (c *Cluster) await(p *Process, what string, cond func() error) error {
	err := until.Poll(readyTimeout, func() error {
		if trouble := p.trouble(); len(trouble) > 0 {
			return nil
		}
		return cond()
	})
	if trouble := p.trouble(); len(trouble) > 0 {
		err = errors.New(strings.Join(trouble, "; "))
	}
	if err != nil {
		return fmt.Errorf("%s: not within %v that it %s: %w\n%s", p.Name, readyTimeout, what, err, p.Tail(30))
	}
	return nil
}

func (c *Cluster) serverReady() error {
	_, err := c.read(context.Background(), "/readyz")
	return err
}

// WaitRuntime returns when the daemon answers, after a restart for instance.
func (c *Cluster) WaitRuntime() error {
	return c.await(c.Daemon, "answers", func() error {
		_, err := c.Tripod("info")
		return err
	})
}

// Drain waits until the kubelet has removed the last pod and its logs from the node, which it does once a minute. The pods
// must have been deleted before.
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

// processes are the programs in the order in which they end: who asks goes before who answers, and the pods have been
// deleted by then.
func (c *Cluster) processes() []*Process {
	return []*Process{c.Proxy, c.Kubelet, c.Scheduler, c.ControllerManager, c.Daemon, c.APIServer, c.Etcd}
}

// Stop ends the cluster. Its error names the programs that had ended before, or did not end when they were asked to.
func (c *Cluster) Stop() error {
	var errs []error
	for _, p := range c.processes() {
		errs = append(errs, p.Stop())
		for _, end := range p.trouble() {
			errs = append(errs, fmt.Errorf("%s\n%s", end, p.Tail(30)))
		}
	}
	return errors.Join(errs...)
}

// Leaks describes what is left in the world of a cluster that has been stopped, and is nil when nothing is.
func (c *Cluster) Leaks() error {
	return until.Poll(5*time.Second, func() error {
		after := harness.Snapshot(nil)
		maps.DeleteFunc(after.Mounts, func(name string, _ int) bool {
			// The daemon's, for as long as the node is up.
			return strings.HasPrefix(name, "/run/tripod ") || strings.HasPrefix(name, "/run/tripod/netns ")
		})
		return c.before.Leaks(after)
	})
}
