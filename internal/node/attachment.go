package node

import (
	"k8s.io/apimachinery/pkg/api/resource"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/network"
)

// Kubernetes's annotations for limits on a pod's traffic, in bits per second.
const (
	annotationIngress = "kubernetes.io/ingress-bandwidth"
	annotationEgress  = "kubernetes.io/egress-bandwidth"
)

// attachment describes the pod to the network.
func attachment(p *Pod) network.Attachment {
	m, dns := p.Config.GetMetadata(), p.Config.GetDnsConfig()
	a := network.Attachment{
		ID: p.ID, Name: m.GetName(), Namespace: m.GetNamespace(), UID: m.GetUid(),
		DNS:          network.DNS{Servers: dns.GetServers(), Searches: dns.GetSearches(), Options: dns.GetOptions()},
		CgroupParent: p.Config.GetLinux().GetCgroupParent(),
		Annotations:  p.Config.GetAnnotations(),
		PortMappings: portMappings(p.Config),
	}
	ingress, egress := bandwidth(p, annotationIngress), bandwidth(p, annotationEgress)
	if ingress > 0 || egress > 0 {
		a.Bandwidth = &network.Bandwidth{Ingress: ingress, Egress: egress}
	}
	return a
}

func portMappings(c *runtimeapi.PodSandboxConfig) (mappings []network.PortMapping) {
	for _, pm := range c.GetPortMappings() {
		mappings = append(mappings, network.PortMapping{
			HostPort: pm.GetHostPort(), ContainerPort: pm.GetContainerPort(),
			Protocol: runtimeapi.Protocol_name[int32(pm.GetProtocol())], HostIP: pm.GetHostIp(),
		})
	}
	return mappings
}

// bandwidth returns the limit that the given annotation sets, or 0 for no limit. As in other runtimes, a value that is
// not a quantity means no limit.
func bandwidth(p *Pod, annotation string) uint64 {
	q, err := resource.ParseQuantity(p.Config.GetAnnotations()[annotation])
	if err != nil {
		return 0
	}
	return uint64(max(0, q.Value()))
}
