package cloudinit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// metaData is JSON in both forms, with a key per line. Keys of the annotation replace ours.
func (b *builder) metaData() ([]byte, error) {
	keys, err := b.sshKeys()
	if err != nil {
		return nil, err
	}
	m := map[string]any{"instance-id": b.in.PodUID, "local-hostname": b.in.Hostname}
	if len(keys) > 0 {
		m["public-keys"] = keys
	}
	configDrive := b.in.Options.ImageType == annotations.ConfigDrive
	if configDrive && len(keys) > 0 {
		// OpenStack's form, which cloud-init wants in this place; the list is Virtlet's.
		named := map[string]string{}
		for i, key := range keys {
			named[fmt.Sprintf("key-%d", i)] = key
		}
		m["public_keys"] = named
	}
	maps.Copy(m, b.in.Options.MetaData)
	if configDrive {
		for theirs, ours := range map[string]string{"uuid": "instance-id", "hostname": "local-hostname"} {
			if _, given := m[theirs]; !given {
				m[theirs] = m[ours]
			}
		}
	}
	return encodeJSON(m)
}

// sshKeys are those of the source, then those of the annotation, or the latter alone if they are to overwrite.
func (b *builder) sshKeys() ([]string, error) {
	o := b.in.Options
	if o.SSHKeySource.IsZero() || o.UserDataOverwrite && o.SSHKeys != nil {
		return o.SSHKeys, nil
	}
	text, err := b.value(annotations.Source{Kind: o.SSHKeySource.Kind, Name: o.SSHKeySource.Name}, o.SSHKeySource.Key)
	if err != nil {
		return nil, fmt.Errorf("SSH keys: %w", err)
	}
	keys, err := annotations.SSHKeys(string(text))
	if err != nil {
		return nil, fmt.Errorf("SSH keys: %s: %v: %w", o.SSHKeySource, err, errdefs.ErrInvalidArgument)
	}
	return append(keys, o.SSHKeys...), nil
}

// encodeJSON is JSON with a key per line, in the keys' order, that is read as YAML too, which cloud-init does: every string is
// in quotes (its YAML library fails on a plain = and takes many words for something else), and characters that YAML does
// not allow in a stream, or breaks lines at, are escaped.
func encodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("%v: %w", err, errdefs.ErrInvalidArgument)
	}
	var text bytes.Buffer
	for _, r := range b.String() {
		if r >= 0x7f && r < 0xa0 || r >= 0xfffe && r <= 0xffff || r == 0xfeff {
			fmt.Fprintf(&text, "\\u%04x", r)
		} else {
			text.WriteRune(r)
		}
	}
	return text.Bytes(), nil
}
