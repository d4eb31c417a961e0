package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// ResolvConf is the node's resolver configuration.
	ResolvConf = "/etc/resolv.conf"
	// upstreamConf has the servers that systemd-resolved asks. ResolvConf names only its stub on loopback.
	upstreamConf = "/run/systemd/resolve/resolv.conf"
)

// DNS returns the pod's resolver configuration: the request's as it is or, if that sets nothing, the node's. The notice
// is "" or says which of the node's servers the pod lacks.
func (p *Pod) DNS() (dns *runtimeapi.DNSConfig, notice string, err error) {
	if d := p.Config.GetDnsConfig(); proto.Size(d) > 0 {
		return d, "", nil
	}
	if p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == runtimeapi.NamespaceMode_NODE {
		dns, err = readResolvConf(ResolvConf)
		return dns, "", err
	}
	return NodeDNS("/")
}

// NodeDNS returns the node's resolver configuration for pods with a network namespace of their own. It leaves out the
// servers that such a pod cannot reach. If none remains, it takes those that systemd-resolved asks. The notice is "" or
// says what is missing. The node's files are below root.
func NodeDNS(root string) (dns *runtimeapi.DNSConfig, notice string, err error) {
	dns, err = readResolvConf(filepath.Join(root, ResolvConf))
	if err != nil {
		return nil, "", err
	}
	named := dns.Servers
	dns.Servers = slices.DeleteFunc(slices.Clone(named), unreachable)
	if len(dns.Servers) == len(named) && len(named) > 0 {
		return dns, "", nil
	}
	// The option vouches for the resolver on the node, not for others.
	dns.Options = slices.DeleteFunc(dns.Options, func(o string) bool { return o == "trust-ad" })
	if len(dns.Servers) > 0 {
		missing := slices.DeleteFunc(named, func(s string) bool { return !unreachable(s) })
		return dns, fmt.Sprintf("pods cannot reach the name server %s of %s, and do without it", strings.Join(missing, " "), ResolvConf), nil
	}
	upstream, err := readResolvConf(filepath.Join(root, upstreamConf))
	if err != nil {
		return nil, "", err
	}
	if dns.Servers = slices.DeleteFunc(upstream.Servers, unreachable); len(dns.Servers) == 0 {
		notice = fmt.Sprintf("pods have no name server, because %s names none that they can reach (set dnsConfig, or name one there): %q",
			ResolvConf, named)
	}
	return dns, notice, nil
}

// unreachable reports whether a name server of the node is out of reach from a pod's network namespace, or no address.
// The scope of a link-local address is an interface of the node.
func unreachable(server string) bool {
	addr, err := netip.ParseAddr(server)
	addr = addr.Unmap()
	return err != nil || addr.IsLoopback() || addr.IsUnspecified() || addr.Is6() && addr.IsLinkLocalUnicast()
}

// readResolvConf reads the directives of resolv.conf(5) that matter. A missing file counts as empty.
func readResolvConf(name string) (*runtimeapi.DNSConfig, error) {
	text, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the node's resolver configuration: %w", err)
	}
	dns := &runtimeapi.DNSConfig{}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		switch words[0] {
		case "nameserver":
			dns.Servers = append(dns.Servers, words[1])
		case "search", "domain":
			// The last directive counts. The root alone means no domain; machines would get an empty name.
			dns.Searches = slices.DeleteFunc(words[1:], func(w string) bool { return w == "." })
		case "options":
			dns.Options = append(dns.Options, words[1:]...)
		}
	}
	return dns, nil
}
