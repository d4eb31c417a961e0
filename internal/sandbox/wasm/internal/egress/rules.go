package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// Values of the annotation that are not lists.
const (
	// None is the list that allows nothing.
	None = "none"
	// Any is the entry that allows all addresses except the special ones.
	Any = "*"
)

// maxRules bounds the entries of a list.
const maxRules = 256

// Rules are the allow-list of a pod. The zero value allows nothing.
type Rules struct{ list []rule }

// rule allows either a name, or a prefix of addresses, or (any) all addresses that are not special.
type rule struct {
	any       bool
	prefix    netip.Prefix
	name      string // in lower case, without a final dot
	below     bool   // also the names below name, but not name itself
	low, high uint16 // ports
}

// special are the addresses that a name, a wildcard or a larger prefix never allows: those of this host and this link,
// which have services that trust their neighbours, those where clouds serve credentials, and those of many hosts. To
// allow some of them, a rule must name them by a prefix inside of the special one.
var special = withTranslated(
	netip.MustParsePrefix("0.0.0.0/8"), // RFC 1122, 3.2.1.3; Linux connects 0.0.0.0 to the own host
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),     // RFC 3927; clouds serve credentials at 169.254.169.254
	netip.MustParsePrefix("100.100.100.200/32"), // the metadata service of Alibaba Cloud
	netip.MustParsePrefix("168.63.129.16/32"),   // the wire server of Azure
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"), // reserved, and the broadcast address
	netip.MustParsePrefix("::/96"),       // unspecified, loopback, and IPv4 addresses in a form that is obsolete
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("fd00:ec2::254/128"), // the metadata service of Amazon EC2
	netip.MustParsePrefix("fd20:ce::254/128"),  // the metadata service of Google Cloud
	netip.MustParsePrefix("ff00::/8"),
)

// translators are the prefixes whose addresses contain an IPv4 address right after the prefix, to which a gateway
// translates or carries the packets: NAT64 (RFC 6052, 2.1) and 6to4 (RFC 3056, 2).
var translators = []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("2002::/16")}

// withTranslated adds to each IPv4 prefix the IPv6 prefixes that lead to it by a translator.
func withTranslated(list ...netip.Prefix) []netip.Prefix {
	for _, p := range slices.Clone(list) {
		if !p.Addr().Is4() {
			continue
		}
		for _, t := range translators {
			addr := t.Addr().As16()
			copy(addr[t.Bits()/8:], p.Addr().AsSlice())
			list = append(list, netip.PrefixFrom(netip.AddrFrom16(addr), t.Bits()+p.Bits()))
		}
	}
	return list
}

// localhost is the name that always means the loopback addresses (RFC 6761, 6.3).
const localhost = "localhost"

// ParseRules parses a list of entries HOST or HOST:PORTS, separated by commas. HOST is a name, *.NAME for the names
// below it, an address or a prefix (IPv6 in brackets if ports follow), or * for all addresses that are not special.
// PORTS is a number, a range LOW-HIGH, or *, which is the default. The list "none" allows nothing. An error is
// errdefs.ErrInvalidArgument.
func ParseRules(text string) (Rules, error) {
	var r Rules
	if strings.TrimSpace(text) == None {
		return r, nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		one, err := parseRule(strings.TrimSpace(entry))
		if err != nil {
			return Rules{}, fmt.Errorf("%q: %w: %w", strings.TrimSpace(entry), err, errdefs.ErrInvalidArgument)
		}
		r.list = append(r.list, one)
	}
	if len(r.list) > maxRules {
		return Rules{}, fmt.Errorf("%d entries; the limit is %d: %w", len(r.list), maxRules, errdefs.ErrInvalidArgument)
	}
	return r, nil
}

func parseRule(entry string) (r rule, err error) {
	host, ports := splitPorts(entry)
	if r.low, r.high, err = parsePorts(ports); err != nil {
		return r, err
	}
	if host == Any {
		r.any = true
		return r, nil
	}
	if prefix, err := netip.ParsePrefix(host); err == nil {
		if prefix != prefix.Masked() {
			return r, fmt.Errorf("the prefix has bits beyond its length; write %s", prefix.Masked())
		}
		r.prefix = prefix
		return r, checkPrefix(prefix)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return r, fmt.Errorf("an address cannot have a zone here")
		}
		r.prefix = netip.PrefixFrom(addr, addr.BitLen())
		return r, checkPrefix(r.prefix)
	}
	r.name, r.below = strings.CutPrefix(Normalize(host), "*.")
	if !validName(r.name) {
		return r, fmt.Errorf("this is neither a name, *.NAME, an address, a prefix nor *")
	}
	return r, nil
}

func checkPrefix(p netip.Prefix) error {
	if p.Addr().Is4In6() {
		return fmt.Errorf("write the IPv4 address %s", p.Addr().Unmap())
	}
	return nil
}

// splitPorts splits an entry at the colon before the ports. IPv6 addresses have colons, so they need brackets if ports
// follow.
func splitPorts(entry string) (host, ports string) {
	if inner, ok := strings.CutPrefix(entry, "["); ok {
		host, rest, _ := strings.Cut(inner, "]")
		return host, strings.TrimPrefix(rest, ":")
	}
	if strings.Count(entry, ":") == 1 {
		host, ports, _ = strings.Cut(entry, ":")
		if ports == "" {
			ports = "?" // a colon without ports is invalid
		}
		return host, ports
	}
	return entry, ""
}

func parsePorts(text string) (low, high uint16, err error) {
	if text == "" || text == "*" {
		return 0, 65535, nil
	}
	from, to, ranged := strings.Cut(text, "-")
	if !ranged {
		to = from
	}
	a, errA := strconv.ParseUint(from, 10, 16)
	b, errB := strconv.ParseUint(to, 10, 16)
	if errA != nil || errB != nil || a == 0 || a > b {
		return 0, 0, fmt.Errorf("%q is neither a port, a range of ports nor *", text)
	}
	return uint16(a), uint16(b), nil
}

// Normalize returns a host name in lower case and without its final dot.
func Normalize(name string) string { return strings.TrimSuffix(strings.ToLower(name), ".") }

// validName reports whether a name in lower case is a host name (RFC 1123, 2.1), or one with underscores.
func validName(name string) bool {
	if len(name) == 0 || len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if len(label) == 0 || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return true
}

// Empty reports whether the rules allow nothing.
func (r Rules) Empty() bool { return len(r.list) == 0 }

// MayResolve reports whether one of the names can lead to an allowed address at the port. Port 0 means any port. Names
// that lead nowhere are not resolved, because a query is a message to whoever owns the name.
func (r Rules) MayResolve(names []string, port uint16) bool {
	return slices.ContainsFunc(r.list, func(x rule) bool { return x.hasPort(port) && (x.name == "" || x.hasName(names)) })
}

// Allows reports whether a pod may connect to an address, which it has asked for by the given names. For an address that
// it has asked for directly, there are no names.
func (r Rules) Allows(names []string, to netip.AddrPort) bool {
	addr := to.Addr().Unmap().WithZone("")
	within := slices.IndexFunc(special, func(p netip.Prefix) bool { return p.Contains(addr) })
	return slices.ContainsFunc(r.list, func(x rule) bool {
		switch {
		case !x.hasPort(to.Port()):
			return false
		case x.any:
			return within < 0
		case x.name != "":
			return x.hasName(names) && (within < 0 || x.name == localhost && addr.IsLoopback())
		}
		return x.prefix.Contains(addr) && (within < 0 || special[within].Bits() <= x.prefix.Bits())
	})
}

func (x rule) hasPort(port uint16) bool { return port == 0 || x.low <= port && port <= x.high }

func (x rule) hasName(names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		if x.below {
			return strings.HasSuffix(name, "."+x.name)
		}
		return name == x.name
	})
}
