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

// injectedFiles returns the files in Options.FilesSource. The key X holds a file's content, and X_path the file's path
// in the guest. X_encoding is the content's encoding, base64 (the default) or plain. Only root can read files from a
// Secret.
func (b *builder) injectedFiles() ([]file, error) {
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
		if describesFile(values, key) {
			continue
		}
		fail := func(format string, args ...any) error {
			return fmt.Errorf("files for the guest: %s, key %q: %s: %w", s, key, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
		}
		to := strings.TrimSpace(string(values[key+"_path"]))
		if to == "" || strings.ContainsFunc(to, isControl) || slices.Contains(strings.Split(to, "/"), "..") {
			return nil, fail("%s_path is %q, which is not the path of a file", key, to)
		}
		f := file{name: path.Join("/", to), data: values[key], mode: mode}
		switch encoding := strings.TrimSpace(string(values[key+"_encoding"])); encoding {
		case annotations.EncodingPlain:
		case "", annotations.EncodingBase64:
			if f.data, err = base64.StdEncoding.DecodeString(strings.Join(strings.Fields(string(f.data)), "")); err != nil {
				return nil, fail("%v; if the content is not encoded, set %s_encoding to plain", err, key)
			}
		default:
			return nil, fail("%s_encoding is %q; allowed: plain, base64", key, encoding)
		}
		files = append(files, f)
	}
	return files, nil
}

// describesFile reports whether the given key is the X_path or X_encoding of a file X, and not itself a file.
func describesFile(values map[string][]byte, key string) bool {
	if _, isFile := values[key+"_path"]; isFile {
		return false
	}
	for _, suffix := range []string{"_path", "_encoding"} {
		if stem, ok := strings.CutSuffix(key, suffix); ok {
			if _, exists := values[stem]; exists {
				return true
			}
		}
	}
	return false
}
