package node

import (
	"cmp"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/network"
)

// hostPorts returns the ports of the node that a pod takes. On the host network, these are the ports of its containers.
func hostPorts(c *runtimeapi.PodSandboxConfig) (ports []network.PortMapping) {
	for _, p := range portMappings(c) {
		if hostNetwork(c) {
			p.HostPort = cmp.Or(p.HostPort, p.ContainerPort)
		}
		if p.HostPort != 0 {
			ports = append(ports, p)
		}
	}
	return ports
}

// checkPodsPorts refuses a new pod that wants a host port of another pod. A pod has its host ports until its network is
// released. A new sandbox of the same pod need not wait for that, so that a kubelet can replace sandboxes that a reboot
// has ended. The caller holds the pool's lock, so of two such pods at the same time, one gets the port.
func (n *Node) checkPodsPorts(pod *Pod) error {
	wanted := hostPorts(pod.Config)
	if len(wanted) == 0 {
		return nil
	}
	for _, p := range n.pool.all() {
		other := p.rec.Load()
		if other.networkReleased() || other.State == Killed && samePod(pod.Config, other.Config) {
			continue
		}
		for _, taken := range hostPorts(other.Config) {
			for _, port := range wanted {
				if port.Conflicts(taken) {
					m := other.Config.GetMetadata()
					return portTaken(port, fmt.Sprintf("pod %s/%s (ID %s)", m.GetNamespace(), m.GetName(), p.id))
				}
			}
		}
	}
	return nil
}

// checkProcessesPorts refuses a pod that wants a host port on which a process of the node listens. A port mapping would
// take the process's connections away.
func checkProcessesPorts(c *runtimeapi.PodSandboxConfig) error {
	for _, port := range hostPorts(c) {
		if process := port.HostProcess(hostNetwork(c)); process != "" {
			return portTaken(port, process)
		}
	}
	return nil
}

func portTaken(port network.PortMapping, holder string) error {
	return fmt.Errorf("port_mappings: host port %s is in use by %s: %w", port.HostPortString(), holder, errdefs.ErrFailedPrecondition)
}
