package cloudinit

import (
	"encoding/base64"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// mountScript is what Virtlet calls the place for its commands in a user-data script.
const mountScript = "@virtlet-mount-script@"

// Files of the guest that are Virtlet's, too.
const (
	linkScriptPath  = "/etc/cloud/symlink-devs.sh"
	mountScriptPath = "/etc/cloud/mount-volumes.sh"
)

// userData is a script or document as the pod gives it whole, else a cloud-config of what the pod gives and what we add.
func (b *builder) userData(shares []Mount) ([]byte, error) {
	if o := b.in.Options; o.UserDataSourceKey != "" || o.UserDataScript != "" {
		return b.wholeUserData(shares)
	}
	data, err := b.pods()
	if err != nil {
		return nil, err
	}
	if err := b.addMounts(data, shares); err != nil {
		return nil, err
	}
	files, err := b.writeFiles(shares)
	if err != nil {
		return nil, err
	}
	if err := extend(data, "write_files", files); err != nil {
		return nil, err
	}
	text, err := encodeJSON(data)
	if err != nil {
		return nil, fmt.Errorf("user data: %w", err)
	}
	return append([]byte("#cloud-config\n"), text...), nil
}

func (b *builder) wholeUserData(shares []Mount) ([]byte, error) {
	o := b.in.Options
	text := []byte(o.UserDataScript)
	if o.UserDataSourceKey != "" {
		var err error
		if text, err = b.value(o.UserDataSource, o.UserDataSourceKey); err != nil {
			return nil, fmt.Errorf("user data: %w", err)
		}
		if o.UserDataSourceEncoding == annotations.EncodingBase64 {
			if text, err = base64.StdEncoding.DecodeString(strings.Join(strings.Fields(string(text)), "")); err != nil {
				return nil, fmt.Errorf("user data: %s, key %q: %v: %w", o.UserDataSource, o.UserDataSourceKey, err, errdefs.ErrInvalidArgument)
			}
		}
	}
	// Both are looked at for what is wrong with them, although no file is written.
	files, err := b.writeFiles(shares)
	if err != nil {
		return nil, err
	}
	scripts := strings.Join(slices.DeleteFunc([]string{b.linkScript(), b.mountScript(shares)}, func(s string) bool { return s == "" }), "\n")
	if n := len(files); n > 0 && !strings.Contains(string(text), mountScript) {
		b.warn("the user data is given whole: %d files (environment, Secrets, ConfigMaps, scripts) are not written into the guest", n)
	}
	return []byte(strings.ReplaceAll(string(text), mountScript, scripts)), nil
}

// pods is what the pod gives as user data: the source first, the annotation over it.
func (b *builder) pods() (map[string]any, error) {
	o := b.in.Options
	data := map[string]any{}
	if !o.UserDataSource.IsZero() {
		values, err := b.values(o.UserDataSource)
		if err != nil {
			return nil, fmt.Errorf("user data: %w", err)
		}
		for key, text := range values {
			if data[key], err = annotations.Value(string(text)); err != nil {
				return nil, fmt.Errorf("user data: %s, key %q: not YAML: %v: %w", o.UserDataSource, key, err, errdefs.ErrInvalidArgument)
			}
		}
	}
	if o.UserDataOverwrite {
		maps.Copy(data, o.UserData)
		return data, nil
	}
	if o.UserData == nil {
		return data, nil
	}
	return merge(data, o.UserData).(map[string]any), nil
}

// merge joins mappings and appends lists; anything else is replaced. Neither of its arguments is changed.
func merge(base, over any) any {
	switch over := over.(type) {
	case map[string]any:
		if base, ok := base.(map[string]any); ok {
			merged := maps.Clone(base)
			for key, value := range over {
				if was, ok := merged[key]; ok {
					value = merge(was, value)
				}
				merged[key] = value
			}
			return merged
		}
	case []any:
		if base, ok := base.([]any); ok {
			return append(slices.Clone(base), over...)
		}
	}
	return over
}

// extend appends to a list of the user data.
func extend(data map[string]any, key string, more []any) error {
	list, ok := data[key].([]any)
	if !ok && data[key] != nil {
		return fmt.Errorf("user data: %s: a %T where a list is wanted: %w", key, data[key], errdefs.ErrInvalidArgument)
	}
	if len(more) > 0 {
		data[key] = append(slices.Clone(list), more...)
	}
	return nil
}

// shares are the mounts that the guest mounts, each after those above it.
func (b *builder) shares() ([]Mount, error) {
	var shares []Mount
	for _, m := range b.in.Mounts {
		kind, err := Classify(m.HostPath, m.ContainerPath, b.in.ShareDriver)
		switch {
		case err != nil:
			return nil, err
		case kind == KindDevice:
			return nil, fmt.Errorf("mount at %s: %s is a block device; give it as a device (volumeDevices): %w", m.ContainerPath, m.HostPath, errdefs.ErrInvalidArgument)
		case kind != KindShare:
			continue
		case !shareTag.MatchString(m.Tag):
			return nil, fmt.Errorf("mount at %s: the tag %q of the share is not of 1 to 31 letters, digits, '-', '_', '.' and ':': %w", m.ContainerPath, m.Tag, errdefs.ErrInvalidArgument)
		case strings.ContainsFunc(m.ContainerPath, notInFstab):
			return nil, fmt.Errorf("mount at %q: white space and backslashes cannot be in a path that the guest has in its fstab: %w", m.ContainerPath, errdefs.ErrInvalidArgument)
		}
		m.ContainerPath = path.Clean(m.ContainerPath)
		shares = append(shares, m)
	}
	slices.SortStableFunc(shares, func(a, b Mount) int {
		return strings.Count(a.ContainerPath, "/") - strings.Count(b.ContainerPath, "/")
	})
	return shares, nil
}

func notInFstab(r rune) bool { return control(r) || r == ' ' || r == '\\' || r == 0xa0 }

// shareType is the type of the file system that the shares are for the guest.
func (b *builder) shareType() string {
	if b.in.ShareDriver == machine.ShareVirtiofs {
		return "virtiofs"
	}
	return "9p"
}

// options are those of mounting a share.
func (b *builder) options(m Mount) string {
	o := "rw"
	if m.ReadOnly {
		o = "ro"
	}
	if b.in.ShareDriver != machine.ShareVirtiofs {
		o += ",trans=virtio,version=9p2000.L,msize=131072"
	}
	return o
}

// addMounts puts the names of devices that are there before our links into the pod's own mounts, and adds the shares. They
// are in the vendor data, too: of what is no block device cloud-init 22.4 mounts only what has a colon in its name.
func (b *builder) addMounts(data map[string]any, shares []Mount) error {
	var more []any
	for _, m := range shares {
		more = append(more, []any{m.Tag, m.ContainerPath, b.shareType(), b.options(m) + ",nofail", "0", "0"})
	}
	if err := extend(data, "mounts", more); err != nil {
		return err
	}
	list, _ := data["mounts"].([]any)
	list = slices.Clone(list)
	for i, entry := range list {
		fields, ok := entry.([]any)
		if !ok || len(fields) == 0 {
			continue
		}
		for _, d := range b.in.Devices {
			if fields[0] == any(d.Path) {
				list[i] = append([]any{b.byID(d)}, fields[1:]...)
			}
		}
	}
	if list != nil {
		data["mounts"] = list
	}
	return nil
}

// writeFiles are the files that we add.
func (b *builder) writeFiles(shares []Mount) ([]any, error) {
	var list []any
	add := func(at string, data []byte, mode uint32) {
		entry := map[string]any{"path": at, "permissions": fmt.Sprintf("0%03o", mode)}
		if text := string(data); utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return control(r) && r != '\n' && r != '\t' }) {
			entry["content"] = text
		} else {
			entry["content"], entry["encoding"] = base64.StdEncoding.EncodeToString(data), "b64"
		}
		list = append(list, entry)
	}
	for _, m := range b.in.Mounts {
		if kind, err := Classify(m.HostPath, m.ContainerPath, b.in.ShareDriver); err != nil || kind != KindFiles {
			continue // errors are told by shares
		}
		files, err := b.read(m)
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if strings.ContainsFunc(f.name, control) {
				return nil, fmt.Errorf("mount at %s: the name %q is not text: %w", m.ContainerPath, f.name, errdefs.ErrInvalidArgument)
			}
			add(path.Join(m.ContainerPath, f.name), f.data, uint32(f.mode))
		}
	}
	injected, err := b.injected()
	if err != nil {
		return nil, err
	}
	for _, f := range injected {
		add(f.name, f.data, uint32(f.mode))
	}
	if script := b.linkScript(); script != "" {
		add(linkScriptPath, []byte(script), 0o755)
	}
	if script := b.mountScript(shares); script != "" {
		add(mountScriptPath, []byte(script), 0o755)
	}
	shell, systemd, err := b.environment()
	if err != nil {
		return nil, err
	}
	if shell != "" {
		add(environmentPath, []byte(shell), 0o644)
	}
	if systemd != "" {
		add(environmentDPath, []byte(systemd), 0o644)
	}
	return list, nil
}
