package wasm

import (
	"fmt"
	"net"
	"path"
	"regexp"
	"strings"

	"github.com/Masterminds/semver/v3"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// componentName is the name of a component (domain:server@version), in parts.
type componentName struct{ domain, server, version string }

func (n componentName) String() string {
	if n == (componentName{}) {
		return ""
	}
	return n.domain + ":" + n.server + "@" + n.version
}

// The labels, below the prefix, that name a component.
const (
	labelDomain  = "domain"
	labelServer  = "server"
	labelVersion = "version"
)

// named reads a name from labels or annotations. The plus sign of a version, which no label can hold, may be an
// underscore.
func named(values map[string]string, prefix string) componentName {
	return componentName{
		domain: values[prefix+labelDomain], server: values[prefix+labelServer],
		version: strings.ReplaceAll(values[prefix+labelVersion], "_", "+"),
	}
}

// checkImage compares the image with the name in the pod's labels, which determine the image: the manifest's
// annotations must have the same name, or the last parts of the reference must spell it.
func checkImage(wanted componentName, annotations map[string]string, prefix string, references []string) error {
	if says := named(annotations, prefix); says != (componentName{}) {
		if says == wanted {
			return nil
		}
		return fmt.Errorf("image: the pod's labels name the component %s, but the image is %s (annotations %sdomain, server, version of its manifest): %w",
			wanted, says, prefix, errdefs.ErrInvalidArgument)
	}
	for _, ref := range references {
		if spells(ref, wanted) {
			return nil
		}
	}
	return fmt.Errorf("image: the pod's labels name the component %s; neither does the image say that it is that one (`tripod push --component %s`) "+
		"nor does its reference %q end in %s/%s:%s: %w", wanted, wanted, references, strings.ToLower(wanted.domain), strings.ToLower(wanted.server),
		strings.ToLower(tagOf(wanted.version)), errdefs.ErrInvalidArgument)
}

func tagOf(version string) string { return strings.ReplaceAll(version, "+", "_") }

// spells reports whether a reference ends in domain/server:version, in lower case.
func spells(ref string, n componentName) bool {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return false
	}
	tagged, ok := named.(reference.Tagged)
	want := "/" + strings.ToLower(n.domain) + "/" + strings.ToLower(n.server)
	return ok && strings.HasSuffix("/"+named.Name(), want) && strings.EqualFold(tagged.Tag(), tagOf(n.version))
}

// The forms of a name's parts, as the node reads them.
var (
	domainForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)
	serverForm = regexp.MustCompile(`^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$`)
)

// separators are what stands between the words of a name.
var separators = regexp.MustCompile(`[^A-Za-z0-9]+`)

const maxNamePart = 63

// derive makes a name of an image reference: the registry's host, the last part of the repository, and the tag as a
// version. It is empty when the reference does not give one.
func derive(references []string) componentName {
	for _, ref := range references {
		parsed, err := reference.ParseNormalizedNamed(ref)
		if err != nil {
			continue
		}
		domain := reference.Domain(parsed)
		if host, _, err := net.SplitHostPort(domain); err == nil {
			domain = host
		}
		n := componentName{domain: strings.ToLower(domain), server: path.Base(reference.Path(parsed)), version: versionOf(parsed)}
		if !serverForm.MatchString(n.server) {
			n.server = strings.Trim(separators.ReplaceAllString(n.server, "-"), "-")
		}
		if domainForm.MatchString(n.domain) && serverForm.MatchString(n.server) && len(n.server) <= maxNamePart {
			return n
		}
	}
	return componentName{}
}

// versionOf is the tag as a SemVer 2.0 version: v1.2 is 1.2.0, and a tag that is no version becomes a pre-release of
// 0.0.0.
func versionOf(ref reference.Named) string {
	tagged, ok := ref.(reference.Tagged)
	if !ok {
		if d, ok := ref.(reference.Digested); ok {
			return "0.0.0-sha256-" + d.Digest().Encoded()[:12]
		}
		return "0.0.0-latest"
	}
	tag := strings.ReplaceAll(tagged.Tag(), "_", "+")
	if v, err := semver.NewVersion(tag); err == nil && len(v.String()) <= maxNamePart {
		return v.String()
	}
	v := "0.0.0-" + strings.Trim(separators.ReplaceAllString(tagged.Tag(), "-"), "-")
	if _, err := semver.StrictNewVersion(v); err != nil || len(v) > maxNamePart {
		return "0.0.0-latest"
	}
	return v
}

// references are the names by which a container's image was asked for, the user's own first.
func references(spec *runtimeapi.ImageSpec, tags, digests []string) []string {
	var refs []string
	for _, ref := range []string{spec.GetUserSpecifiedImage(), spec.GetImage()} {
		if ref != "" && !strings.HasPrefix(ref, "sha256:") && !hexID.MatchString(ref) {
			refs = append(refs, ref)
		}
	}
	return append(append(refs, tags...), digests...)
}
