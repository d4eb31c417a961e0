package wasm

import (
	"fmt"
	"net"
	"path"
	"strings"

	"github.com/Masterminds/semver/v3"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// Claims reports whether a container in a pod of another backend runs the component in its image. An image with a root file
// system can also have programs; a command that names no .wasm file is one of them. It needs no backend, because a node
// without one must not run the component as a program.
func Claims(config *runtimeapi.ContainerConfig, img image.Image) bool {
	switch {
	case img.Component == nil:
		return false
	case img.Component.Layout == image.LayoutRootfs && len(config.GetCommand()) > 0:
		return strings.HasSuffix(config.GetCommand()[0], ".wasm")
	default:
		return true
	}
}

// componentName is a component name, domain:server@version.
type componentName struct{ domain, server, version string }

func (n componentName) String() string {
	if n == (componentName{}) {
		return ""
	}
	return n.domain + ":" + n.server + "@" + n.version
}

// The labels that name a component, without their prefix.
const (
	labelDomain  = "domain"
	labelServer  = "server"
	labelVersion = "version"
)

// nameFrom reads a name from labels or annotations. An underscore in a version means a plus sign, which labels cannot
// contain.
func nameFrom(values map[string]string, prefix string) componentName {
	return componentName{
		domain: values[prefix+labelDomain], server: values[prefix+labelServer],
		version: strings.ReplaceAll(values[prefix+labelVersion], "_", "+"),
	}
}

// checkImage checks that the image contains the component whose name is in the pod's labels. The manifest's annotations
// must give the same name. If the manifest has no such annotations, one of the image's references must end with the
// name.
func checkImage(wanted componentName, annotations map[string]string, prefix string, references []string) error {
	if says := nameFrom(annotations, prefix); says != (componentName{}) {
		if says == wanted {
			return nil
		}
		return fmt.Errorf("image: the pod's labels name the component %s, but the image's manifest names %s (annotations %sdomain, server, version): %w",
			wanted, says, prefix, errdefs.ErrInvalidArgument)
	}
	for _, ref := range references {
		if spells(ref, wanted) {
			return nil
		}
	}
	return fmt.Errorf("image: the pod's labels name the component %s, but the image's manifest does not (use `tripod push --component %s`) "+
		"and no reference in %q ends in %s/%s:%s: %w", wanted, wanted, references, strings.ToLower(wanted.domain), strings.ToLower(wanted.server),
		strings.ToLower(tagOf(wanted.version)), errdefs.ErrInvalidArgument)
}

func tagOf(version string) string { return strings.ReplaceAll(version, "+", "_") }

// spells reports whether a reference ends in domain/server:version, ignoring case.
func spells(ref string, n componentName) bool {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return false
	}
	tagged, ok := named.(reference.Tagged)
	want := "/" + strings.ToLower(n.domain) + "/" + strings.ToLower(n.server)
	return ok && strings.HasSuffix("/"+named.Name(), want) && strings.EqualFold(tagged.Tag(), tagOf(n.version))
}

// Valid parts of a component name, defined as in package node.
var (
	domainForm = lazyregexp.New(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)
	serverForm = lazyregexp.New(`^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$`)
)

// separators matches the characters between the words of a name.
var separators = lazyregexp.New(`[^A-Za-z0-9]+`)

const maxNamePart = 63

// derive makes a name from the first suitable image reference. The domain is the registry's host, the server is the
// last part of the repository, and the version is the tag. The name is empty if no reference is suitable.
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
		if !serverForm().MatchString(n.server) {
			n.server = strings.Trim(separators().ReplaceAllString(n.server, "-"), "-")
		}
		if domainForm().MatchString(n.domain) && serverForm().MatchString(n.server) && len(n.server) <= maxNamePart {
			return n
		}
	}
	return componentName{}
}

// versionOf converts a reference's tag to a SemVer 2.0 version: v1.2 becomes 1.2.0, and a tag that is not a version
// becomes a pre-release of 0.0.0.
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
	v := "0.0.0-" + strings.Trim(separators().ReplaceAllString(tagged.Tag(), "-"), "-")
	if _, err := semver.StrictNewVersion(v); err != nil || len(v) > maxNamePart {
		return "0.0.0-latest"
	}
	return v
}

// references returns the references of a container's image: first the two in the spec (user_specified_image and image),
// then those by tag, then those by digest. It omits image IDs.
func references(spec *runtimeapi.ImageSpec, tags, digests []string) []string {
	var refs []string
	for _, ref := range []string{spec.GetUserSpecifiedImage(), spec.GetImage()} {
		if ref != "" && !strings.HasPrefix(ref, "sha256:") && !hexID().MatchString(ref) {
			refs = append(refs, ref)
		}
	}
	return append(append(refs, tags...), digests...)
}
