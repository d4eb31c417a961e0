package cri

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"unicode"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// validateSandboxConfig checks what can be checked in a RunPodSandbox request without knowing the state of the node.
func validateSandboxConfig(c *runtimeapi.PodSandboxConfig) error {
	if c == nil {
		return required("config")
	}
	if c.GetWindows() != nil {
		return invalid("config.windows", "this node runs Linux")
	}
	return cmp.Or(
		validateSandboxMetadata("config.metadata", c.GetMetadata()),
		validateHostname("config.hostname", c.GetHostname()),
		validateAbsolute("config.log_directory", c.GetLogDirectory()),
		validateNoDotDot("config.log_directory", c.GetLogDirectory()),
		validateDNS("config.dns_config", c.GetDnsConfig()),
		validatePortMappings("config.port_mappings", c.GetPortMappings()),
		validateKeyValues("config.labels", c.GetLabels()),
		validateAnnotations("config.annotations", c.GetAnnotations()),
		validateLinuxSandbox("config.linux", c.GetLinux()),
	)
}

func validateSandboxMetadata(field string, m *runtimeapi.PodSandboxMetadata) error {
	if m == nil {
		return required(field)
	}
	return cmp.Or(
		validateName(field+".name", m.GetName()),
		validateName(field+".namespace", m.GetNamespace()),
		validateName(field+".uid", m.GetUid()),
	)
}

func validateHostname(field, name string) error {
	if len(name) > maxHostnameLength {
		return invalid(field, "is %d bytes long; the limit is %d", len(name), maxHostnameLength)
	}
	if strings.ContainsFunc(name, notInLine) || strings.Contains(name, "/") {
		return invalid(field, "%q is not a host name", name)
	}
	return nil
}

// validateDNS requires that every entry of resolv.conf is one word.
func validateDNS(field string, d *runtimeapi.DNSConfig) error {
	word := func(field, w string) error {
		if w == "" || strings.ContainsFunc(w, notInLine) {
			return invalid(field, "%q is not one word", w)
		}
		return nil
	}
	return cmp.Or(
		validateEach(field+".servers", d.GetServers(), word),
		validateEach(field+".searches", d.GetSearches(), word),
		validateEach(field+".options", d.GetOptions(), word),
	)
}

// notInLine matches characters that would begin another word or line.
func notInLine(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }

func validatePortMappings(field string, mappings []*runtimeapi.PortMapping) error {
	taken := map[string]int{}
	for i, m := range mappings {
		f := fmt.Sprintf("%s[%d]", field, i)
		if err := validatePortMapping(f, m); err != nil {
			return err
		}
		if m.GetHostPort() == 0 {
			continue
		}
		host := fmt.Sprintf("%s %s:%d", m.GetProtocol(), m.GetHostIp(), m.GetHostPort())
		if other, ok := taken[host]; ok {
			return invalid(f+".host_port", "%s is in port_mappings[%d] already", host, other)
		}
		taken[host] = i
	}
	return nil
}

func validatePortMapping(field string, m *runtimeapi.PortMapping) error {
	least := int32(0)
	if m.GetHostPort() != 0 {
		least = 1
	}
	if ip := m.GetHostIp(); ip != "" {
		if _, err := netip.ParseAddr(ip); err != nil {
			return invalid(field+".host_ip", "%q is not an IP address", ip)
		}
	}
	return cmp.Or(
		validateEnum(field+".protocol", m.GetProtocol(), runtimeapi.Protocol_name),
		validatePort(field+".host_port", m.GetHostPort(), 0),
		validatePort(field+".container_port", m.GetContainerPort(), least),
	)
}

func validateLinuxSandbox(field string, l *runtimeapi.LinuxPodSandboxConfig) error {
	sc, f := l.GetSecurityContext(), field+".security_context"
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil {
		return invalid(f+".run_as_group", "must not be set without run_as_user")
	}
	return cmp.Or(
		validatePath(field+".cgroup_parent", l.GetCgroupParent()),
		validateNoDotDot(field+".cgroup_parent", l.GetCgroupParent()),
		validateSysctls(field+".sysctls", l.GetSysctls()),
		validateResources(field+".overhead", l.GetOverhead()),
		validateResources(field+".resources", l.GetResources()),
		validateSandboxNamespaces(f+".namespace_options", sc.GetNamespaceOptions()),
		validateID(f+".run_as_user", sc.GetRunAsUser()),
		validateID(f+".run_as_group", sc.GetRunAsGroup()),
		validateGroups(f, sc.GetSupplementalGroups(), sc.GetSupplementalGroupsPolicy()),
		validateSeccomp(f+".seccomp", sc.GetSeccomp()),
		validateProfile(f+".apparmor", sc.GetApparmor()),
	)
}

// validateSysctls checks the form of the names. The backend decides which sysctls a pod may set.
func validateSysctls(field string, sysctls map[string]string) error {
	for name := range sysctls {
		if name == "" || strings.ContainsFunc(name, notInLine) || strings.Contains(name, "..") {
			return invalid(field, "%q is not the name of a sysctl", name)
		}
	}
	return nil
}
