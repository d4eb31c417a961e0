package network

import (
	"encoding/json"
	"math"
	"net/netip"
	"strings"
)

// interfaceName is the name that Kubernetes expects for a pod's default interface.
const interfaceName = "eth0"

// Attachment describes a pod to the network.
type Attachment struct {
	// ID is the pod's ID. It determines the path of the network namespace and the CNI container ID (keyOf).
	ID string
	// Name, Namespace and UID identify the pod in Kubernetes. They are passed in CNI_ARGS unless empty.
	Name, Namespace, UID string
	// PortMappings maps host ports to ports of the pod. Entries without a host port are ignored.
	PortMappings []PortMapping
	// Bandwidth limits the pod's traffic; nil means no limit.
	Bandwidth *Bandwidth
	// DNS is the pod's resolver configuration (capability "dns").
	DNS DNS
	// CgroupParent is the pod's cgroup path (capability "cgroupPath").
	CgroupParent string
	// Annotations are the pod's annotations (capability "io.kubernetes.cri.pod-annotations").
	Annotations map[string]string
	// MakeNetns makes the pod's network namespace and pins it on the given file. If it is nil, the namespace belongs to
	// the node's user namespace.
	MakeNetns func(pin string) error
}

// PortMapping maps a port of the node to a port of the pod.
type PortMapping struct {
	HostPort, ContainerPort int32
	// Protocol is tcp, udp or sctp, in upper or lower case; "" means tcp.
	Protocol string
	// HostIP is the node's address to listen on; "" means all addresses.
	HostIP string
}

// Bandwidth limits a pod's traffic, in bits per second; 0 means no limit.
type Bandwidth struct {
	// Ingress limits what the pod receives. Egress limits what the pod sends.
	Ingress, Egress uint64
}

// DNS is a resolver configuration.
type DNS struct {
	Servers  []string `json:"servers,omitempty"`
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"`
}

// Capability arguments as defined by CNI's CONVENTIONS.md ("Dynamic Plugin specific Fields").
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
)

// Names of the capabilities that Attachment has arguments for.
const (
	capPortMappings = "portMappings"
	capBandwidth    = "bandwidth"
	capDNS          = "dns"
	capCgroupPath   = "cgroupPath"
	capAnnotations  = "io.kubernetes.cri.pod-annotations"
)

// burst is the burst size for a rate-limited interface, in bits. It is effectively unlimited, as in other Kubernetes
// runtimes; the bandwidth plugin refuses 0.
const burst = math.MaxInt32

// validate reports the first mistake in the request.
func (a Attachment) validate() error {
	if err := validateID(a.ID); err != nil {
		return err
	}
	for field, value := range map[string]string{"name": a.Name, "namespace": a.Namespace, "uid": a.UID} {
		// CNI_ARGS has no escape syntax, so a value that contains a separator could set other arguments.
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

// args returns the arguments for CNI_ARGS, under the names that all Kubernetes runtimes use.
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

// capabilities returns the capability arguments by name. libcni passes to each plugin only the arguments for
// capabilities that the plugin declares.
func (a Attachment) capabilities() (map[string]json.RawMessage, error) {
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
		wanted[capDNS] = d
	}
	if a.CgroupParent != "" {
		wanted[capCgroupPath] = a.CgroupParent
	}
	if len(a.Annotations) > 0 {
		wanted[capAnnotations] = a.Annotations
	}
	caps := make(map[string]json.RawMessage, len(wanted))
	for name, value := range wanted {
		data, err := json.Marshal(value)
		if err != nil {
			return nil, err
		}
		caps[name] = data
	}
	return caps, nil
}

func (b Bandwidth) entry() bandwidthEntry {
	var e bandwidthEntry // the plugin refuses a burst without a rate
	if b.Ingress > 0 {
		e.IngressRate, e.IngressBurst = b.Ingress, burst
	}
	if b.Egress > 0 {
		e.EgressRate, e.EgressBurst = b.Egress, burst
	}
	return e
}
