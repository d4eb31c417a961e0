package cloudinit

import (
	"fmt"
	"path"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// findSource returns the mount that holds a ConfigMap or Secret. This is the mount at SourceDir/KIND/NAME or, if there
// is none, the pod's volume of that kind and name, wherever it is mounted. A volume's directory has the name of the
// volume, not of the object, so a volume is found only if it has the same name as the object.
func (b *builder) findSource(s annotations.Source) (Mount, error) {
	for _, m := range b.in.Mounts {
		if path.Clean(m.ContainerPath) == path.Join(SourceDir, s.Kind, s.Name) {
			return m, nil
		}
	}
	for _, m := range b.in.Mounts {
		if match := apiVolume().FindStringSubmatch(path.Clean(m.HostPath)); match != nil && match[1] == s.Kind && match[2] == s.Name {
			return m, nil
		}
	}
	return Mount{}, fmt.Errorf("%s: the pod does not mount it: mount it at %s, or name its volume %q: %w",
		s, path.Join(SourceDir, s.Kind, s.Name), s.Name, errdefs.ErrInvalidArgument)
}

// values returns the keys and values in a ConfigMap or Secret.
func (b *builder) values(s annotations.Source) (map[string][]byte, error) {
	m, err := b.findSource(s)
	if err != nil {
		return nil, err
	}
	files, err := b.read(m)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s, err)
	}
	values := make(map[string][]byte, len(files))
	for _, f := range files {
		values[f.name] = f.data
	}
	return values, nil
}

// value returns the value of a key in a ConfigMap or Secret.
func (b *builder) value(s annotations.Source, key string) ([]byte, error) {
	values, err := b.values(s)
	if err != nil {
		return nil, err
	}
	value, ok := values[key]
	if !ok {
		return nil, fmt.Errorf("%s: key %q is missing: %w", s, key, errdefs.ErrInvalidArgument)
	}
	return value, nil
}
