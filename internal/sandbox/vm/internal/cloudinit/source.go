package cloudinit

import (
	"fmt"
	"path"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// find is the mount that holds a ConfigMap or Secret: the one at SourceDir/KIND/NAME, else a volume of that kind which the
// pod calls NAME, wherever it is mounted. The kubelet's directory carries the volume's name, not the object's, so the
// second works for pods whose volume is called as the object is.
func (b *builder) find(s annotations.Source) (Mount, error) {
	for _, m := range b.in.Mounts {
		if path.Clean(m.ContainerPath) == path.Join(SourceDir, s.Kind, s.Name) {
			return m, nil
		}
	}
	for _, m := range b.in.Mounts {
		if match := apiVolume.FindStringSubmatch(path.Clean(m.HostPath)); match != nil && match[1] == s.Kind && match[2] == s.Name {
			return m, nil
		}
	}
	return Mount{}, fmt.Errorf("%s: %v: mount it at %s, or call its volume %q: %w",
		s, errNoSource, path.Join(SourceDir, s.Kind, s.Name), s.Name, errdefs.ErrInvalidArgument)
}

// values are the keys and values of a ConfigMap or Secret.
func (b *builder) values(s annotations.Source) (map[string][]byte, error) {
	m, err := b.find(s)
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

// value is one of them.
func (b *builder) value(s annotations.Source, key string) ([]byte, error) {
	values, err := b.values(s)
	if err != nil {
		return nil, err
	}
	value, ok := values[key]
	if !ok {
		return nil, fmt.Errorf("%s: it has no key %q: %w", s, key, errdefs.ErrInvalidArgument)
	}
	return value, nil
}
