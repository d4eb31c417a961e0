package node

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/Masterminds/semver/v3"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// Component is the name of a component, for example example.com:foo.Bar@1.2.3 (seed 1, "Resource Hierarchy"). A name
// has exactly one spelling, which ComponentFromLabels accepts and String returns.
type Component struct {
	// Domain is a lower-case DNS name or 32 lower-case hex digits.
	Domain string
	// Server is a dotted identifier (foo.Bar) or a DNS label, 63 characters at most.
	Server string
	// Version is a SemVer 2.0 version.
	Version string
}

var (
	domainPattern = lazyregexp.New(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)
	serverPattern = lazyregexp.New(`^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$`)
	podIDPattern  = lazyregexp.New(`^[0-9a-f]{64}$`)
)

const (
	maxDomain  = 253 // RFC 1035
	maxServer  = 63
	maxVersion = 63 // a Kubernetes label value
)

// String returns the canonical spelling, domain:server@version.
func (c Component) String() string { return c.Domain + ":" + c.Server + "@" + c.Version }

// validate rejects every spelling except the canonical one.
func (c Component) validate() error {
	if len(c.Domain) > maxDomain || !domainPattern().MatchString(c.Domain) {
		return fmt.Errorf("component domain %q is neither a lower-case DNS name nor 32 hex digits: %w", c.Domain, errdefs.ErrInvalidArgument)
	}
	if len(c.Server) > maxServer || !serverPattern().MatchString(c.Server) {
		return fmt.Errorf("component server %q is neither a dotted identifier nor a DNS label of up to %d characters: %w", c.Server, maxServer,
			errdefs.ErrInvalidArgument)
	}
	if _, err := semver.StrictNewVersion(c.Version); err != nil || len(c.Version) > maxVersion {
		return fmt.Errorf("component version %q is not SemVer 2.0 of up to %d characters: %w", c.Version, maxVersion, errdefs.ErrInvalidArgument)
	}
	return nil
}

// ComponentFromLabels reads the labels PREFIXdomain, PREFIXserver and PREFIXversion; ok is false if none is set. A
// label value cannot hold a plus sign, so an underscore precedes build metadata instead: 1.2.3_build.
func ComponentFromLabels(labels map[string]string, prefix string) (c Component, ok bool, err error) {
	domain, d := labels[prefix+"domain"]
	server, s := labels[prefix+"server"]
	version, v := labels[prefix+"version"]
	if !d && !s && !v {
		return Component{}, false, nil
	}
	if !d || !s || !v {
		return Component{}, false,
			fmt.Errorf("labels %[1]sdomain, %[1]sserver and %[1]sversion must be set together: %[2]w", prefix, errdefs.ErrInvalidArgument)
	}
	c = Component{Domain: domain, Server: server, Version: strings.Replace(version, "_", "+", 1)}
	return c, true, c.validate()
}

// Instance returns the ID of a component's nth pod: component#n, with n in lower-case hex.
func (c Component) Instance(n uint64) string { return c.String() + "#" + strconv.FormatUint(n, 16) }

// attemptID returns the ID of the nth attempt of a unit pod's container. For a component, the ID is the pod's ID, a
// dot, and n in lower-case hex (example.com:foo.Bar@1.2.3#0.1). For other pods, it is a hash of 64 hex digits. The ID
// must differ from the pod's ID, because a kubelet keeps containers and sandboxes in one map.
func (p *Pod) attemptID(n uint64) string {
	id := p.ID + "." + strconv.FormatUint(n, 16)
	if !podIDPattern().MatchString(p.ID) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

// newID returns a random ID of 64 hex digits.
func newID() string {
	raw := make([]byte, 32)
	_, _ = rand.Read(raw) // documented never to fail
	return hex.EncodeToString(raw)
}
