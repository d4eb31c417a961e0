package network

import (
	"encoding/json"
	"math"
	"net/netip"
	"strings"
)

// interfaceName is the pod's default interface, as Kubernetes expects it.
const interfaceName = "eth0"

// Attachment is what the network needs to know of a pod.
type Attachment struct {
	// ID is the pod's ID; it names the network namespace and the CNI container ID.
	ID string
	// Name, Namespace and UID are Kubernetes' names of the pod, passed as CNI_ARGS when not empty.
	Name, Namespace, UID string
	// PortMappings are the host ports; entries without a host port are ignored.
	PortMappings []PortMapping
	// Bandwidth limits the pod's traffic; nil: no limit.
	Bandwidth *Bandwidth
	// DNS is the pod's resolver configuration (capability "dns").
	DNS DNS
	// CgroupParent is the pod's cgroup path (capability "cgroupPath").
	CgroupParent string
	// Annotations of the pod (capability "io.kubernetes.cri.pod-annotations").
	Annotations map[string]string
}

// PortMapping makes a port of the pod reachable at the node.
type PortMapping struct {
	HostPort, ContainerPort int32
	// Protocol is tcp, udp or sctp in any case; "" is tcp.
	Protocol string
	// HostIP is the node's address to listen at; "" is all of them.
	HostIP string
}

// Bandwidth holds limits in bits per second, 0 is none.
type Bandwidth struct {
	// Ingress is what the pod may receive, Egress what it may send.
	Ingress, Egress uint64
}

// DNS is a resolver configuration.
type DNS struct {
	Servers, Searches, Options []string
}

// The capability arguments as CNI's CONVENTIONS.md defines them ("Dynamic Plugin specific Fields").
type (
	portMapEntry struct {
		HostPort      int32  `json:"hostPort"`
		ContainerPort int32  `json:"containerPort"`
		Protocol      string `json:"protocol"`
		HostIP        string `json:"hostIP,omitempty"`
	}
	bandwidthEntry struct {
		IngressRate  uint64 `json:"ingressRate,omitempty"`
		IngressBurst uint64 `json:"ingressBurst,omitempty"`
		EgressRate   uint64 `json:"egressRate,omitempty"`
		EgressBurst  uint64 `json:"egressBurst,omitempty"`
	}
	dnsEntry struct {
		Servers  []string `json:"servers,omitempty"`
		Searches []string `json:"searches,omitempty"`
		Options  []string `json:"options,omitempty"`
	}
)

// Names of the capabilities that we can serve.
const (
	capPortMappings = "portMappings"
	capBandwidth    = "bandwidth"
	capDNS          = "dns"
	capCgroupPath   = "cgroupPath"
	capAnnotations  = "io.kubernetes.cri.pod-annotations"
)

// burst is how many bits may pass at once over a limited interface: as good as no bound, as Kubernetes' users know
// it; the bandwidth plugin refuses 0.
const burst = math.MaxInt32

// validate finds the caller's mistakes before anything is done.
func (a Attachment) validate() error {
	if err := validateID(a.ID); err != nil {
		return err
	}
	for field, value := range map[string]string{"name": a.Name, "namespace": a.Namespace, "uid": a.UID} {
		// CNI_ARGS has no escape for its separators: such a name could set other arguments.
		if strings.ContainsAny(value, ";=\x00") {
			return invalidf("network of pod %s: %s %q must not contain ';', '=' or NUL", a.ID, field, value)
		}
	}
	for _, p := range a.PortMappings {
		if _, err := p.entry(); err != nil {
			return err
		}
	}
	return nil
}

func (p PortMapping) entry() (portMapEntry, error) {
	e := portMapEntry{HostPort: p.HostPort, ContainerPort: p.ContainerPort, Protocol: strings.ToLower(p.Protocol), HostIP: p.HostIP}
	if e.HostPort < 0 || e.HostPort > math.MaxUint16 {
		return e, invalidf("port mapping: host port %d is not in 0–65535", p.HostPort)
	}
	if e.ContainerPort < 1 || e.ContainerPort > math.MaxUint16 {
		return e, invalidf("port mapping: container port %d is not in 1–65535", p.ContainerPort)
	}
	switch e.Protocol {
	case "":
		e.Protocol = "tcp"
	case "tcp", "udp", "sctp":
	default:
		return e, invalidf("port mapping: protocol %q is not tcp, udp or sctp", p.Protocol)
	}
	if p.HostIP != "" {
		if _, err := netip.ParseAddr(p.HostIP); err != nil {
			return e, invalidf("port mapping: host IP %q: %v", p.HostIP, err)
		}
	}
	return e, nil
}

// args are the CNI_ARGS, with the names that Kubernetes' runtimes agreed upon.
func (a Attachment) args() [][2]string {
	args := [][2]string{{"IgnoreUnknown", "1"}}
	for _, arg := range [][2]string{
		{"K8S_POD_NAMESPACE", a.Namespace},
		{"K8S_POD_NAME", a.Name},
		{"K8S_POD_INFRA_CONTAINER_ID", a.ID},
		{"K8S_POD_UID", a.UID},
	} {
		if arg[1] != "" {
			args = append(args, arg)
		}
	}
	return args
}

// capabilities are the capability arguments; libcni hands each plugin those that it declares. Values are JSON from
// the start, so that they compare equal to what a record gives back.
func (a Attachment) capabilities() (map[string]any, error) {
	wanted := map[string]any{}
	var ports []portMapEntry
	for _, p := range a.PortMappings {
		if e, _ := p.entry(); e.HostPort != 0 {
			ports = append(ports, e)
		}
	}
	if len(ports) > 0 {
		wanted[capPortMappings] = ports
	}
	if b := a.Bandwidth; b != nil && (b.Ingress > 0 || b.Egress > 0) {
		wanted[capBandwidth] = b.entry()
	}
	if d := a.DNS; len(d.Servers)+len(d.Searches)+len(d.Options) > 0 {
		wanted[capDNS] = dnsEntry(d)
	}
	if a.CgroupParent != "" {
		wanted[capCgroupPath] = a.CgroupParent
	}
	if len(a.Annotations) > 0 {
		wanted[capAnnotations] = a.Annotations
	}
	for name, value := range wanted {
		data, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		wanted[name] = json.RawMessage(data)
	}
	return wanted, nil
}

func (b Bandwidth) entry() bandwidthEntry {
	var e bandwidthEntry
	if b.Ingress > 0 {
		e.IngressRate, e.IngressBurst = b.Ingress, burst
	}
	if b.Egress > 0 {
		e.EgressRate, e.EgressBurst = b.Egress, burst
	}
	return e
}
