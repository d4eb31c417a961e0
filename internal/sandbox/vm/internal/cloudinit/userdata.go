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

// mountScript is Virtlet's placeholder for the link and mount commands in a user-data script.
const mountScript = "@virtlet-mount-script@"

// Paths of scripts in the guest, the same as Virtlet's.
const (
	linkScriptPath  = "/etc/cloud/symlink-devs.sh"
	mountScriptPath = "/etc/cloud/mount-volumes.sh"
)

// userData returns the user-data. If the pod gives a whole script or document, userData returns that. Otherwise it
// returns a cloud-config with the pod's keys, the mounts and the files. If the annotation has another form than a
// cloud-config, it becomes a part of its own.
func (b *builder) userData(shares []Mount) ([]byte, error) {
	if o := b.in.Options; o.UserDataSourceKey != "" || o.UserDataScript != "" {
		return b.wholeUserData(shares)
	}
	data, err := b.podUserData()
	if err != nil {
		return nil, err
	}
	if b.in.Options.UserDataDocument.Text != "" {
		return b.withDocument(data, shares)
	}
	if err := b.addOwn(data, shares); err != nil {
		return nil, err
	}
	p, err := configPart(data, "")
	if err != nil {
		return nil, err
	}
	return joinParts([]part{p}), nil
}

// withDocument returns user-data with the keys of the source, the document and our own keys, in this order. Each part
// is omitted if it is empty.
func (b *builder) withDocument(source map[string]any, shares []Mount) ([]byte, error) {
	document := b.in.Options.UserDataDocument
	for _, key := range []string{"mounts", "write_files"} {
		if _, err := listAt(source, key); err != nil {
			return nil, err // the guest's cloud-init could not append our own list
		}
	}
	own := map[string]any{}
	if err := b.addOwn(own, shares); err != nil {
		return nil, err
	}
	b.useUdevPaths(source)
	for _, d := range b.in.Devices {
		if strings.Contains(document.Text, d.Path) {
			b.warn("the user data have %s and are kept as they are: if they mount it, name it %s there", d.Path, b.udevPath(d))
		}
	}
	before, err := configPart(source, "")
	if err != nil {
		return nil, err
	}
	after, err := configPart(own, mergeLists)
	if err != nil {
		return nil, err
	}
	parts := []part{documentPart(document)}
	if len(source) > 0 {
		parts = append([]part{before}, parts...)
	}
	if len(own) > 0 {
		parts = append(parts, after)
	}
	return joinParts(parts), nil
}

// addOwn adds the mounts and the files to data.
func (b *builder) addOwn(data map[string]any, shares []Mount) error {
	if err := b.addMounts(data, shares); err != nil {
		return err
	}
	files, err := b.writeFiles(shares)
	if err != nil {
		return err
	}
	return appendToList(data, "write_files", files)
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
	// The guest does not get these files, but they are checked, and counted for a warning.
	files, err := b.writeFiles(shares)
	if err != nil {
		return nil, err
	}
	scripts := strings.Join(slices.DeleteFunc([]string{b.linkScript(), b.mountScript(shares)}, func(s string) bool { return s == "" }), "\n")
	if n := len(files); n > 0 && !strings.Contains(string(text), mountScript) {
		b.warn("the pod gives the user data as a whole: %d files (environment, Secrets, ConfigMaps, scripts) are not written into the guest", n)
	}
	return []byte(strings.ReplaceAll(string(text), mountScript, scripts)), nil
}

// podUserData returns the pod's user-data: the keys in the source, replaced by or merged with the keys in the
// annotation.
func (b *builder) podUserData() (map[string]any, error) {
	o := b.in.Options
	data := map[string]any{}
	if !o.UserDataSource.IsZero() {
		values, err := b.values(o.UserDataSource)
		if err != nil {
			return nil, fmt.Errorf("user data: %w", err)
		}
		for key, text := range values {
			if annotations.IsDocument(string(text)) {
				return nil, fmt.Errorf("user data: %s, key %q: not a value but a whole document; name its key with the annotation %scloud-init-user-data-source-key: %w",
					o.UserDataSource, key, annotations.Prefix, errdefs.ErrInvalidArgument)
			}
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

// merge merges two mappings, or appends one list to another. In any other case it returns the second value. It does not
// change its arguments.
func merge(base, over any) any {
	switch over := over.(type) {
	case map[string]any:
		if base, ok := base.(map[string]any); ok {
			merged := maps.Clone(base)
			for key, value := range over {
				if old, ok := merged[key]; ok {
					value = merge(old, value)
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

// appendToList appends to the list data[key].
func appendToList(data map[string]any, key string, more []any) error {
	list, err := listAt(data, key)
	if err == nil && len(more) > 0 {
		data[key] = append(slices.Clone(list), more...)
	}
	return err
}

// listAt returns the list data[key]. It returns errdefs.ErrInvalidArgument if data[key] is something else.
func listAt(data map[string]any, key string) ([]any, error) {
	list, ok := data[key].([]any)
	if !ok && data[key] != nil {
		return nil, fmt.Errorf("user data: %s is not a list: %w", key, errdefs.ErrInvalidArgument)
	}
	return list, nil
}

// shares returns the mounts that reach the guest as shares, parent directories first.
func (b *builder) shares() ([]Mount, error) {
	var shares []Mount
	for _, m := range b.in.Mounts {
		kind, err := Classify(m.HostPath, m.ContainerPath, b.in.ShareDriver)
		switch {
		case err != nil:
			return nil, err
		case kind == KindDevice:
			return nil, fmt.Errorf("mount at %s: %s is a block device; give it as a device (volumeDevices): %w", m.ContainerPath, m.HostPath,
				errdefs.ErrInvalidArgument)
		case kind != KindShare:
			continue
		case !shareTag().MatchString(m.Tag):
			return nil, fmt.Errorf("mount at %s: the tag %q of the share does not consist of 1 to 31 letters, digits, '-', '_', '.' and ':': %w",
				m.ContainerPath, m.Tag, errdefs.ErrInvalidArgument)
		case strings.ContainsFunc(m.ContainerPath, notInFstab):
			return nil, fmt.Errorf("mount at %q: the guest's fstab cannot have paths with white space or backslashes: %w", m.ContainerPath,
				errdefs.ErrInvalidArgument)
		}
		m.ContainerPath = path.Clean(m.ContainerPath)
		shares = append(shares, m)
	}
	slices.SortStableFunc(shares, func(a, b Mount) int {
		return strings.Count(a.ContainerPath, "/") - strings.Count(b.ContainerPath, "/")
	})
	return shares, nil
}

func notInFstab(r rune) bool { return isControl(r) || r == ' ' || r == '\\' || r == 0xa0 }

// shareType returns the file system type of shares in the guest.
func (b *builder) shareType() string {
	if b.in.ShareDriver == machine.ShareVirtiofs {
		return "virtiofs"
	}
	return "9p"
}

// mountOptions returns the guest's mount options for a share.
func (b *builder) mountOptions(m Mount) string {
	o := "rw"
	if m.ReadOnly {
		o = "ro"
	}
	if b.in.ShareDriver != machine.ShareVirtiofs {
		o += ",trans=virtio,version=9p2000.L,msize=131072"
	}
	return o
}

// addMounts adds the shares to the mounts in data. The vendor-data also mounts the shares, because cloud-init 22.4
// itself mounts only block devices and sources with a colon in their name.
func (b *builder) addMounts(data map[string]any, shares []Mount) error {
	var more []any
	for _, m := range shares {
		more = append(more, []any{m.Tag, m.ContainerPath, b.shareType(), b.mountOptions(m) + ",nofail", "0", "0"})
	}
	if err := appendToList(data, "mounts", more); err != nil {
		return err
	}
	b.useUdevPaths(data)
	return nil
}

// useUdevPaths replaces the devices' paths in the mounts in data with udev's links, because our own links do not exist
// yet when cloud-init mounts the devices.
func (b *builder) useUdevPaths(data map[string]any) {
	list, _ := data["mounts"].([]any)
	list = slices.Clone(list)
	for i, entry := range list {
		fields, ok := entry.([]any)
		if !ok || len(fields) == 0 {
			continue
		}
		for _, d := range b.in.Devices {
			if fields[0] == any(d.Path) {
				list[i] = append([]any{b.udevPath(d)}, fields[1:]...)
			}
		}
	}
	if list != nil {
		data["mounts"] = list
	}
}

// writeFiles returns the entries for write_files: copied mounts, injected files, scripts and environment.
func (b *builder) writeFiles(shares []Mount) ([]any, error) {
	var list []any
	add := func(at string, data []byte, mode uint32) {
		entry := map[string]any{"path": at, "permissions": fmt.Sprintf("0%03o", mode)}
		if text := string(data); utf8.ValidString(text) &&
			!strings.ContainsFunc(text, func(r rune) bool { return isControl(r) && r != '\n' && r != '\t' }) {
			entry["content"] = text
		} else {
			entry["content"], entry["encoding"] = base64.StdEncoding.EncodeToString(data), "b64"
		}
		list = append(list, entry)
	}
	for _, m := range b.in.Mounts {
		if kind, err := Classify(m.HostPath, m.ContainerPath, b.in.ShareDriver); err != nil || kind != KindFiles {
			continue // b.shares reports such an error
		}
		files, err := b.read(m)
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if strings.ContainsFunc(f.name, isControl) {
				return nil, fmt.Errorf("mount at %s: the name %q has control characters: %w", m.ContainerPath, f.name, errdefs.ErrInvalidArgument)
			}
			add(path.Join(m.ContainerPath, f.name), f.data, uint32(f.mode))
		}
	}
	injected, err := b.injectedFiles()
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
