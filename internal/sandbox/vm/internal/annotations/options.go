package annotations

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/rootdisk"
)

// The prefixes that are ours to read: of Virtlet's keys, which have no domain, and of our own.
const (
	VirtletPrefix = "Virtlet"
	Prefix        = "tripod.dev/vm."
)

// ImageType is the form of the cloud-init disk.
type ImageType string

// The forms of the cloud-init disk.
const (
	NoCloud     ImageType = "nocloud"
	ConfigDrive ImageType = "configdrive"
)

// Encodings of a value in a ConfigMap or Secret.
const (
	EncodingPlain  = "plain"
	EncodingBase64 = "base64"
)

// Source refers to a ConfigMap or Secret that the pod mounts, or to a key of it.
type Source struct {
	// Kind is "configmap" or "secret"; empty when there is no reference.
	Kind string
	// Name is the object's, Key a key of it, empty where none was given.
	Name, Key string
}

// IsZero reports whether there is no reference.
func (s Source) IsZero() bool { return s.Kind == "" }

// String is the reference as it was written.
func (s Source) String() string {
	if s.Key == "" {
		return s.Kind + "/" + s.Name
	}
	return s.Kind + "/" + s.Name + "/" + s.Key
}

// ScratchDisk is an empty disk.
type ScratchDisk struct {
	// Path is the guest's name of it, absolute and clean; Size is in bytes, a multiple of 512.
	Path string
	Size uint64
}

// Options are what the annotations of a pod say.
type Options struct {
	// VCPUs is the number of virtual CPUs, 1 where VCPUsSet is false.
	VCPUs    int
	VCPUsSet bool
	// DiskBus is the bus of all disks.
	DiskBus machine.Bus
	// RootVolumeSize is in bytes, a multiple of 512; 0 is the image's own size.
	RootVolumeSize uint64
	// RootDeviceOverwrite says what a block device may lose that becomes the root disk; empty, as when not given, is never.
	RootDeviceOverwrite rootdisk.Overwrite
	// ScratchDisks are empty disks that go with the container.
	ScratchDisks []ScratchDisk
	// CPUModel is QEMU's name of a model or "host-model"; empty is the driver's choice.
	CPUModel string
	// LibvirtCPU is the XML of a libvirt domain's <cpu>; empty when not given.
	LibvirtCPU string
	// SystemUUID is the SMBIOS UUID in lower case; empty when not given.
	SystemUUID string

	ImageType ImageType
	// MetaData and UserData are cloud-init's, as JSON has them (numbers are json.Number); nil when not given.
	MetaData, UserData map[string]any
	// UserDataOverwrite says that keys of UserData replace those of UserDataSource, and SSHKeys those of SSHKeySource.
	UserDataOverwrite bool
	// UserDataScript is the whole of the user data.
	UserDataScript string
	// UserDataSource is where further user data is: all its keys, or the whole of the user data under UserDataSourceKey in
	// the encoding given.
	UserDataSource         Source
	UserDataSourceKey      string
	UserDataSourceEncoding string
	// SSHKeys are lines of an authorized_keys file; SSHKeySource is where further ones are (its Key is never empty).
	SSHKeys      []string
	SSHKeySource Source
	// FilesSource is where files for the guest are.
	FilesSource Source
	// ForceDHCP says that the guest is to ask for its addresses.
	ForceDHCP bool
	// ShareDriver is how directories reach the guest; empty is the node's choice.
	ShareDriver machine.ShareDriver
	// Chown9pfs asks for shared directories to be given to QEMU's user. Nobody does so: their owners are mapped.
	Chown9pfs bool

	// WaitForAgent says that the VM counts as started when the guest's agent answers.
	WaitForAgent bool
	// VNC asks for a VNC server on a unix socket.
	VNC bool
}

// Parse reads the annotations of a pod. An annotation that is present but empty counts as not given. A value that is not
// allowed, or that is given under both names and differs, is errdefs.ErrInvalidArgument, naming key, value and what is
// allowed. Warnings are sentences for a person, in a stable order: keys below our prefixes that nobody knows, and keys
// that another one leaves without effect. All other annotations are not looked at.
func Parse(all map[string]string) (Options, []string, error) {
	o := Options{VCPUs: 1, DiskBus: machine.BusVirtio, ImageType: NoCloud, UserDataSourceEncoding: EncodingPlain}
	given := keys{}
	for _, a := range Known {
		key, value, err := a.lookup(all)
		if err != nil {
			return Options{}, nil, err
		}
		if value == "" {
			continue
		}
		given[a.Name] = key
		if err := a.set(&o, value); err != nil {
			return Options{}, nil, fmt.Errorf("annotation %s: %s: %v; allowed: %s: %w", key, shown(value), err, a.Allowed, errdefs.ErrInvalidArgument)
		}
	}
	if !o.SSHKeySource.IsZero() && o.SSHKeySource.Key == "" {
		o.SSHKeySource.Key = "authorized_keys"
	}
	warnings := unknown(all)
	more, err := o.cross(given)
	if err != nil {
		return Options{}, nil, err
	}
	return o, append(warnings, more...), nil
}

// lookup finds the annotation under either of its names.
func (a *Annotation) lookup(all map[string]string) (key, value string, err error) {
	own, virtlet := all[a.Key()], ""
	if a.Virtlet != "" {
		virtlet = all[a.Virtlet]
	}
	switch {
	case own != "" && virtlet != "" && own != virtlet:
		return "", "", fmt.Errorf("annotations %s: %s and %s: %s: they are two names of one setting and differ; leave one out: %w",
			a.Key(), shown(own), a.Virtlet, shown(virtlet), errdefs.ErrInvalidArgument)
	case own != "":
		return a.Key(), own, nil
	default:
		return a.Virtlet, virtlet, nil
	}
}

// keys tells by a setting's name under which key it was given.
type keys map[string]string

// of is that key, or ours where the setting was not given.
func (k keys) of(name string) string {
	if key := k[name]; key != "" {
		return key
	}
	return Prefix + name
}

// cross looks at keys that bear on one another.
func (o *Options) cross(k keys) (warnings []string, err error) {
	const (
		script, data                 = "cloud-init-user-data-script", "cloud-init-user-data"
		source, sourceKey, sourceEnc = "cloud-init-user-data-source", "cloud-init-user-data-source-key", "cloud-init-user-data-source-encoding"
	)
	if o.UserDataSourceKey != "" && o.UserDataSource.IsZero() {
		return nil, fmt.Errorf("annotation %s: %q: it is a key of a ConfigMap or Secret, and none is given; name one with %s: %w",
			k.of(sourceKey), o.UserDataSourceKey, k.of(source), errdefs.ErrInvalidArgument)
	}
	idle := func(name, format string, args ...any) {
		warnings = append(warnings, fmt.Sprintf("annotation %s has no effect: %s", k.of(name), fmt.Sprintf(format, args...)))
	}
	whole := ""
	switch {
	case o.UserDataSourceKey != "":
		whole = k.of(sourceKey)
		if o.UserDataScript != "" {
			idle(script, "the user data is taken from %s", whole)
		}
	case o.UserDataScript != "":
		whole = k.of(script)
		if !o.UserDataSource.IsZero() {
			idle(source, "%s is the whole of the user data", whole)
		}
	}
	if whole != "" && o.UserData != nil {
		idle(data, "%s is the whole of the user data", whole)
	}
	if o.UserDataSourceKey == "" && o.UserDataSourceEncoding != EncodingPlain {
		idle(sourceEnc, "it is that of a key, and %s is not given", k.of(sourceKey))
	}
	if o.LibvirtCPU != "" && o.CPUModel != "" {
		idle("cpu-model", "%s says all about the CPU", k.of("libvirt-cpu-setting"))
	}
	if o.Chown9pfs {
		idle("chown-9pfs-mounts", "owners in shared directories are mapped, not changed")
	}
	return warnings, nil
}

// maxUnknown bounds the warnings about keys, of which a request may have any number.
const maxUnknown = 20

// unknown warns of keys that look like ours and are not.
func unknown(all map[string]string) []string {
	names := map[string]bool{}
	for _, a := range Known {
		names[a.Key()], names[a.Virtlet] = true, true
	}
	strange := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(key string) bool {
		return names[key] || !strings.HasPrefix(key, VirtletPrefix) && !strings.HasPrefix(key, Prefix)
	})
	var warnings []string
	for i, key := range strange {
		if i == maxUnknown {
			return append(warnings, fmt.Sprintf("%d more annotations are not known", len(strange)-i))
		}
		warnings = append(warnings, fmt.Sprintf("annotation %q is not known; did you mean %s?", key, nearest(key)))
	}
	return warnings
}

// shown is a value as messages have it: a long one may be somebody's user data and is not for everyone's eyes.
func shown(value string) string {
	if len(value) > 100 || strings.ContainsAny(value, "\n\r") {
		return fmt.Sprintf("its text of %d bytes", len(value))
	}
	return fmt.Sprintf("%q", value)
}
