package annotations

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/rootdisk"
)

// VirtletPrefix is the prefix of Virtlet's keys, which have no domain. Prefix is the prefix of our own keys.
const (
	VirtletPrefix = "Virtlet"
	Prefix        = keys.VM
)

// ImageType is the form of the cloud-init disk.
type ImageType string

// The forms of the cloud-init disk.
const (
	NoCloud     ImageType = "nocloud"
	ConfigDrive ImageType = "configdrive"
)

// Firmware is what boots a disk.
type Firmware string

// The kinds of firmware.
const (
	FirmwareBIOS Firmware = "bios"
	FirmwareUEFI Firmware = "uefi"
)

// Medium is the form in which the guest sees the image's disk.
type Medium string

// The forms of an image's disk.
const (
	MediumCDROM Medium = "cdrom"
	MediumDisk  Medium = "disk"
)

// Encodings of a value in a ConfigMap or Secret.
const (
	EncodingPlain  = "plain"
	EncodingBase64 = "base64"
)

// Source is a reference to a ConfigMap or Secret that the pod mounts, or to a key in one.
type Source struct {
	// Kind is "configmap" or "secret", or empty if there is no reference.
	Kind string
	// Name is the object's name. Key is a key in the object, or empty.
	Name, Key string
}

// IsZero reports whether there is no reference.
func (s Source) IsZero() bool { return s.Kind == "" }

// String returns the reference in the form that annotations use.
func (s Source) String() string {
	if s.Key == "" {
		return s.Kind + "/" + s.Name
	}
	return s.Kind + "/" + s.Name + "/" + s.Key
}

// ScratchDisk is an empty disk.
type ScratchDisk struct {
	// Path is the disk's path in the guest, absolute and clean. Size is in bytes, a multiple of 512.
	Path string
	Size uint64
}

// Options are the settings in a pod's annotations.
type Options struct {
	// VCPUs is the number of virtual CPUs. It is 1 if VCPUsSet is false.
	VCPUs    int
	VCPUsSet bool
	// DiskBus is the bus of all disks.
	DiskBus machine.Bus
	// RootVolumeSize is in bytes, a multiple of 512; 0 means the image's own size.
	RootVolumeSize uint64
	// RootDeviceOverwrite says what the root disk may overwrite on a block device; empty means nothing.
	RootDeviceOverwrite rootdisk.Overwrite
	// Firmware boots the root disk; empty means that the disk's content decides.
	Firmware Firmware
	// ImageMedium is the form of the image's disk; empty means that the disk's content decides.
	ImageMedium Medium
	// ScratchDisks are empty disks that are removed with the container.
	ScratchDisks []ScratchDisk
	// CPUModel is QEMU's name for a model, or "host-model"; empty means the driver's choice.
	CPUModel string
	// LibvirtCPU is the XML of a libvirt domain's <cpu>, or empty.
	LibvirtCPU string
	// SystemUUID is the SMBIOS UUID in lower case, or empty.
	SystemUUID string

	ImageType ImageType
	// MetaData and UserData are cloud-init's meta-data and user-data, or nil. The values have the types of decoded
	// JSON, with json.Number for numbers.
	MetaData, UserData map[string]any
	// UserDataDocument is user-data in a form that is not a mapping. At most one of UserData and UserDataDocument is set.
	UserDataDocument Document
	// UserDataOverwrite means that keys in UserData replace those in UserDataSource. It also means that SSHKeys replace
	// the lines in SSHKeySource.
	UserDataOverwrite bool
	// UserDataScript is the whole user-data, or empty.
	UserDataScript string
	// UserDataSource holds user-data. If UserDataSourceKey is empty, each key in UserDataSource is a key in the
	// user-data. Otherwise the value of the key UserDataSourceKey is the whole user-data, in the encoding
	// UserDataSourceEncoding.
	UserDataSource         Source
	UserDataSourceKey      string
	UserDataSourceEncoding string
	// SSHKeys are lines of an authorized_keys file. SSHKeySource holds more such lines; its Key is never empty.
	SSHKeys      []string
	SSHKeySource Source
	// FilesSource holds files for the guest.
	FilesSource Source
	// ForceDHCP means that the guest gets its addresses by DHCP.
	ForceDHCP bool
	// ShareDriver shares directories with the guest; empty means the node's choice.
	ShareDriver machine.ShareDriver
	// Chown9pfs asks to give shared directories to QEMU's user. It has no effect, because owners are mapped.
	Chown9pfs bool

	// WaitForAgent means that the machine counts as started only when the guest's agent answers.
	WaitForAgent bool
	// VNC asks for a screen and a VNC server.
	VNC bool
	// Template means that the machine continues from a template.
	Template Template
}

// Template is the moment at which a template was saved.
type Template string

// TemplateCloudInit is after cloud-init was done.
const TemplateCloudInit Template = "cloud-init"

// Parse parses a pod's annotations. It ignores empty values and annotations without our prefixes. If a value is not
// allowed, or differs from the value under the setting's other name, Parse returns errdefs.ErrInvalidArgument. The
// error names the key and shows the value. The warnings are sentences in a stable order. They are about unknown keys
// with our prefixes and about keys that have no effect.
func Parse(all map[string]string) (Options, []string, error) {
	o := Options{VCPUs: 1, DiskBus: machine.BusVirtio, ImageType: NoCloud, UserDataSourceEncoding: EncodingPlain}
	given := settings{}
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
			return Options{}, nil,
				fmt.Errorf("annotation %s: %s: %v; allowed: %s: %w", key, shown(value), err, a.Allowed, errdefs.ErrInvalidArgument)
		}
	}
	if !o.SSHKeySource.IsZero() && o.SSHKeySource.Key == "" {
		o.SSHKeySource.Key = "authorized_keys"
	}
	warnings, err := unknown(all)
	if err != nil {
		return Options{}, nil, err
	}
	more, err := o.checkCombinations(given)
	if err != nil {
		return Options{}, nil, err
	}
	return o, append(warnings, more...), nil
}

// lookup looks for the setting under our own key and under Virtlet's key. It returns the key that the annotations
// contain, and the value. If they contain neither key, the value is empty.
func (a *Annotation) lookup(all map[string]string) (key, value string, err error) {
	own, virtlet := all[a.Key()], ""
	if a.Virtlet != "" {
		virtlet = all[a.Virtlet]
	}
	switch {
	case own != "" && virtlet != "" && own != virtlet:
		return "", "", fmt.Errorf("annotations %s: %s and %s: %s: two different values for one setting; remove one: %w",
			a.Key(), shown(own), a.Virtlet, shown(virtlet), errdefs.ErrInvalidArgument)
	case own != "":
		return a.Key(), own, nil
	default:
		return a.Virtlet, virtlet, nil
	}
}

// settings maps the name of each setting that the annotations contain to the key that sets it, which is our own or
// Virtlet's.
type settings map[string]string

// of returns the key that the annotations use for a setting. If they do not contain the setting, it returns our own
// key.
func (k settings) of(name string) string {
	if key := k[name]; key != "" {
		return key
	}
	return Prefix + name
}

// checkCombinations refuses a key if another key that it needs is missing. It warns about keys without effect.
func (o *Options) checkCombinations(k settings) (warnings []string, err error) {
	const (
		script, data                 = "cloud-init-user-data-script", "cloud-init-user-data"
		source, sourceKey, sourceEnc = "cloud-init-user-data-source", "cloud-init-user-data-source-key", "cloud-init-user-data-source-encoding"
	)
	if o.UserDataSourceKey != "" && o.UserDataSource.IsZero() {
		return nil, fmt.Errorf("annotation %s: %q: the ConfigMap or Secret with this key is missing; name it with %s: %w",
			k.of(sourceKey), o.UserDataSourceKey, k.of(source), errdefs.ErrInvalidArgument)
	}
	if o.UserDataDocument.Configures && o.UserDataSourceKey == "" && o.UserDataScript == "" && !o.UserDataSource.IsZero() &&
		!o.UserDataOverwrite {
		return nil, fmt.Errorf("annotation %s: only the guest can read this form, and replaces whole keys of %s with it; allow that with %s, or give all user data by %s: %w",
			k.of(data), k.of(source), k.of("cloud-init-user-data-overwrite"), k.of(sourceKey), errdefs.ErrInvalidArgument)
	}
	idle := func(name, format string, args ...any) {
		warnings = append(warnings, fmt.Sprintf("annotation %s has no effect: %s", k.of(name), fmt.Sprintf(format, args...)))
	}
	whole := ""
	switch {
	case o.UserDataSourceKey != "":
		whole = k.of(sourceKey)
		if o.UserDataScript != "" {
			idle(script, "the user data comes from %s", whole)
		}
	case o.UserDataScript != "":
		whole = k.of(script)
		if !o.UserDataSource.IsZero() {
			idle(source, "%s is the whole user data", whole)
		}
	}
	if whole != "" && (o.UserData != nil || o.UserDataDocument.Text != "") {
		idle(data, "%s is the whole user data", whole)
	}
	if o.UserDataSourceKey == "" && o.UserDataSourceEncoding != EncodingPlain {
		idle(sourceEnc, "it applies to the value under %s, which is missing", k.of(sourceKey))
	}
	if o.LibvirtCPU != "" && o.CPUModel != "" {
		idle("cpu-model", "%s defines the whole CPU", k.of("libvirt-cpu-setting"))
	}
	if o.Template != "" {
		_, named := o.MetaData["instance-id"]
		switch {
		case !o.UserDataSource.IsZero():
			idle("template", "a template would keep what %s names", k.of(source))
			o.Template = ""
		case named:
			idle("template", "with the instance-id in %s, a copy would be no new instance for cloud-init", k.of("cloud-init-meta-data"))
			o.Template = ""
		}
	}
	if o.Chown9pfs {
		idle("chown-9pfs-mounts", "owners in shared directories are mapped, not changed")
	}
	return warnings, nil
}

// maxUnknown is the maximum number of warnings about unknown keys. A request may have any number of unknown keys.
const maxUnknown = 20

// unknown returns a warning for each unknown key of Virtlet, and errdefs.ErrInvalidArgument for an unknown key of ours.
func unknown(all map[string]string) (warnings []string, err error) {
	names := map[string]bool{}
	for _, a := range Known {
		names[a.Key()], names[a.Virtlet] = true, true
	}
	unknown := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(key string) bool {
		return names[key] || !strings.HasPrefix(key, VirtletPrefix) && !strings.HasPrefix(key, Prefix)
	})
	for i, key := range unknown {
		if strings.HasPrefix(key, Prefix) {
			return nil, fmt.Errorf("annotation %q is unknown; did you mean %s?: %w", key, nearest(key), errdefs.ErrInvalidArgument)
		}
		if i == maxUnknown {
			return append(warnings, fmt.Sprintf("%d more annotations are unknown", len(unknown)-i)), nil
		}
		warnings = append(warnings, fmt.Sprintf("annotation %q is unknown; did you mean %s?", key, nearest(key)))
	}
	return warnings, nil
}

// shown returns the form in which messages show a value. Long values are not shown, because they may be confidential
// user-data.
func shown(value string) string {
	if len(value) > 100 || strings.ContainsAny(value, "\n\r") {
		return fmt.Sprintf("a text of %d bytes", len(value))
	}
	return fmt.Sprintf("%q", value)
}
