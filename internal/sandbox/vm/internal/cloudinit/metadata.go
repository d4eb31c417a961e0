package cloudinit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// metaData returns the meta-data as JSON, for both forms of the disk. Keys in the annotation replace generated keys.
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
		// On a config drive, cloud-init expects OpenStack's map public_keys. The list public-keys is kept, as in
		// Virtlet.
		named := map[string]string{}
		for i, key := range keys {
			named[fmt.Sprintf("key-%d", i)] = key
		}
		m["public_keys"] = named
	}
	maps.Copy(m, b.in.Options.MetaData)
	if configDrive {
		for openStack, noCloud := range map[string]string{"uuid": "instance-id", "hostname": "local-hostname"} {
			if _, given := m[openStack]; !given {
				m[openStack] = m[noCloud]
			}
		}
	}
	return encodeJSON(m)
}

// sshKeys returns the SSH keys in the source, followed by those in the annotation. With UserDataOverwrite, keys in the
// annotation replace those in the source.
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

// encodeJSON encodes v as JSON with sorted keys, one per line. cloud-init reads the result as YAML. JSON quotes all
// strings, so that a YAML parser does not misread strings such as "=" or "no". encodeJSON also escapes characters that
// YAML forbids or treats as line breaks.
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
