package cloudinit

import (
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// injected are the files of the source for files: X is the content, X_path its path in the guest, X_encoding base64, which
// is the default, or plain. Those of a Secret are for root only.
func (b *builder) injected() ([]file, error) {
	s := b.in.Options.FilesSource
	if s.IsZero() {
		return nil, nil
	}
	values, err := b.values(s)
	if err != nil {
		return nil, fmt.Errorf("files for the guest: %w", err)
	}
	mode := os.FileMode(0o644)
	if s.Kind == "secret" {
		mode = 0o600
	}
	var files []file
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if about(values, key) {
			continue
		}
		fail := func(format string, args ...any) error {
			return fmt.Errorf("files for the guest: %s, key %q: %s: %w", s, key, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
		}
		to := strings.TrimSpace(string(values[key+"_path"]))
		if to == "" || strings.ContainsFunc(to, control) || slices.Contains(strings.Split(to, "/"), "..") {
			return nil, fail("%s_path is %q; it must be the path of a file", key, to)
		}
		f := file{name: path.Join("/", to), data: values[key], mode: mode}
		switch encoding := strings.TrimSpace(string(values[key+"_encoding"])); encoding {
		case annotations.EncodingPlain:
		case "", annotations.EncodingBase64:
			if f.data, err = base64.StdEncoding.DecodeString(strings.Join(strings.Fields(string(f.data)), "")); err != nil {
				return nil, fail("%v; set %s_encoding to plain if it is the content itself", err, key)
			}
		default:
			return nil, fail("%s_encoding is %q; allowed: plain, base64", key, encoding)
		}
		files = append(files, f)
	}
	return files, nil
}

// about reports whether a key says something about another one.
func about(values map[string][]byte, key string) bool {
	if _, content := values[key+"_path"]; content {
		return false
	}
	for _, suffix := range []string{"_path", "_encoding"} {
		if stem, ok := strings.CutSuffix(key, suffix); ok {
			if _, there := values[stem]; there {
				return true
			}
		}
	}
	return false
}
