package sandbox

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/tripod-run/tripod/internal/keys"
)

// AllowList names the annotations with which pods of one handler may change how they run: a key, or a prefix that ends
// with "*". Other annotations are only kept and reported.
type AllowList []string

// Allows reports whether pods may use the annotation.
func (l AllowList) Allows(key string) bool {
	return slices.ContainsFunc(l, func(pattern string) bool {
		prefix, wild := strings.CutSuffix(pattern, "*")
		return key == pattern || wild && strings.HasPrefix(key, prefix)
	})
}

// Pick returns those annotations that pods may use.
func (l AllowList) Pick(annotations map[string]string) map[string]string {
	picked := maps.Clone(annotations)
	maps.DeleteFunc(picked, func(key, _ string) bool { return !l.Allows(key) })
	return picked
}

// Check returns errdefs.ErrPermissionDenied for an annotation of the pod or of the container, which can be nil, that is
// below keys.Domain or another own prefix and that the list does not allow. Its author expects an effect. The
// annotations of other projects are not refused, because their authors may not have meant this node. Those of the edge
// front door are not the pod's own.
func (l AllowList) Check(p *Pod, c *Container, own ...string) error {
	own = append(own, keys.Domain)
	given := slices.Collect(maps.Keys(p.Config.GetAnnotations()))
	if c != nil {
		given = slices.AppendSeq(given, maps.Keys(c.Config.GetAnnotations()))
	}
	slices.Sort(given)
	for _, key := range given {
		ours := slices.ContainsFunc(own, func(prefix string) bool { return strings.HasPrefix(key, prefix) })
		if ours && !l.Allows(key) && !strings.HasPrefix(key, keys.Edge) {
			return fmt.Errorf("annotation %s: not allowed for pods of this handler (allowed_annotations in the node's configuration: %s): %w",
				key, strings.Join(l, ", "), errdefs.ErrPermissionDenied)
		}
	}
	return nil
}
