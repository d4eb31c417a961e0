package artifact

import (
	"fmt"
	"strings"

	"github.com/Masterminds/semver/v3"
	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/validation"
)

// NameAnnotations returns the annotations that give an artifact the component name domain:server@version. The node
// compares them with the labels of the component's pods (PREFIXdomain, PREFIXserver, PREFIXversion), so they follow the
// rules for labels: an underscore replaces the plus sign in a version.
func NameAnnotations(prefix, name string) (map[string]string, error) {
	domain, rest, ok1 := strings.Cut(name, ":")
	server, version, ok2 := strings.Cut(rest, "@")
	if !ok1 || !ok2 {
		return nil, fmt.Errorf("component name %q is not domain:server@version: %w", name, errdefs.ErrInvalidArgument)
	}
	if wrong := validation.IsDNS1123Subdomain(domain); len(wrong) > 0 {
		return nil, fmt.Errorf("component domain %q: %s: %w", domain, wrong[0], errdefs.ErrInvalidArgument)
	}
	if _, err := semver.StrictNewVersion(version); err != nil {
		return nil, fmt.Errorf("component version %q is not SemVer 2.0: %w", version, errdefs.ErrInvalidArgument)
	}
	version = strings.Replace(version, "+", "_", 1)
	for _, value := range []string{server, version} {
		if wrong := validation.IsValidLabelValue(value); len(wrong) > 0 || value == "" {
			return nil, fmt.Errorf("component name %q: %q is not a valid label value: %w", name, value, errdefs.ErrInvalidArgument)
		}
	}
	return map[string]string{prefix + "domain": domain, prefix + "server": server, prefix + "version": version}, nil
}
