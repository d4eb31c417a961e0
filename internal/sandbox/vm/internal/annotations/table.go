package annotations

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/rootdisk"
)

// Annotation is one setting.
type Annotation struct {
	// Virtlet is Virtlet's key; empty if Virtlet does not have the setting.
	Virtlet string
	// Name is our own key without Prefix.
	Name string
	// Allowed describes the allowed values, Default the default value, and Meaning the effect, all for people to read.
	Allowed, Default, Meaning string

	set func(o *Options, value string) error
}

// Key returns our own key for the setting.
func (a *Annotation) Key() string { return Prefix + a.Name }

const allowedBool = `"true" or "false"`

// Known lists all settings, in the order of the documentation.
var Known = []*Annotation{
	{"VirtletVCPUCount", "vcpu-count", "a number from 1 to 255",
		"the CPU limit, rounded up; without one the request, but at least `[vm] default_cpus`", "number of virtual CPUs", setVCPUs},
	{"VirtletCPUModel", "cpu-model", "`host-model`, or QEMU's name for a CPU model (letters, digits, `.`, `_`, `-`; at most 64)",
		"chosen by the driver", "CPU model of the guest", setCPUModel},
	{"VirtletLibvirtCPUSetting", "libvirt-cpu-setting",
		"YAML or JSON with the fields of libvirt's `<cpu>`, capitalised (`Mode`, `Match`, `Model: {Fallback, Value}`, `Features` …)", "",
		"CPU of the libvirt domain; only with `driver = \"libvirt\"`", setLibvirtCPU},
	{"VirtletSystemUUID", "system-uuid", "a UUID in text form whose digits are not all the same", "derived from the pod's ID",
		"SMBIOS system UUID", setSystemUUID},
	{"", "firmware", "`bios` or `uefi`",
		"`uefi` if the root disk has an EFI system partition and its boot sector has no code, otherwise `bios`",
		"what boots the root disk; a CD-ROM boots by UEFI if its boot catalog has only UEFI entries; an image with its own kernel has no UEFI",
		choice(func(o *Options) *Firmware { return &o.Firmware }, FirmwareBIOS, FirmwareUEFI)},
	{"", "image-medium", "`cdrom` or `disk`", "`cdrom` if the image's disk is an ISO 9660 file, otherwise `disk`",
		"how the guest sees the image's disk", choice(func(o *Options) *Medium { return &o.ImageMedium }, MediumCDROM, MediumDisk)},
	{"VirtletDiskDriver", "disk-driver", "`virtio` or `scsi`", "`virtio` (Virtlet: `scsi`)", "bus of the disks",
		choice(func(o *Options) *machine.Bus { return &o.DiskBus }, machine.BusVirtio, machine.BusSCSI)},
	{"VirtletRootVolumeSize", "root-volume-size", "a Kubernetes quantity from 1 to 64Ti that is a whole number of bytes",
		"the image's own size",
		"size of the root disk, rounded up to 512 bytes; if it is less than the image's, CreateContainer fails (Virtlet ignores it)",
		setRootVolumeSize},
	{"", "root-device-overwrite", "`never`, `foreign` or `image`", "`never`",
		"what may be overwritten on a block device at `/`: with `foreign` anything except Tripod's root disks, with `image` also the root disk of another image", choice(func(o *Options) *rootdisk.Overwrite { return &o.RootDeviceOverwrite }, rootdisk.OverwriteNever, rootdisk.OverwriteForeign, rootdisk.OverwriteImage)},
	{"", "scratch-disks", "at most 8 items `PATH=SIZE`, separated by commas or line breaks, such as `/dev/scratch=10Gi`", "",
		"empty disks with these paths, which are removed with the container", setScratchDisks},
	{"", "share-driver", "`virtiofs`, `9p` or `9p-mapped`", "`virtiofs` if virtiofsd works on the node, otherwise `9p`",
		"how directories reach the guest: `9p` is for guests whose kernel has no virtio-fs; with `9p-mapped` only the guest sees the owners that it sets", choice(func(o *Options) *machine.ShareDriver { return &o.ShareDriver }, machine.ShareVirtiofs, machine.Share9p, machine.Share9pMapped)},
	{"VirtletChown9pfsMounts", "chown-9pfs-mounts", allowedBool, "`false`",
		"no effect, with a warning: owners of shared directories are not changed; if the file system can map owners, the guest's root is root in them", boolean(func(o *Options) *bool { return &o.Chown9pfs })},
	{"VirtletCloudInitImageType", "cloud-init-image-type", "`nocloud` or `configdrive`, in upper or lower case", "`nocloud`",
		"form of the cloud-init disk", setImageType},
	{"VirtletCloudInitMetaData", "cloud-init-meta-data", "a mapping in YAML or JSON, at most 256 KiB", "",
		"keys that replace those in the generated meta-data", setMetaData},
	{"VirtletCloudInitUserData", "cloud-init-user-data",
		"a mapping in YAML or JSON, or another form of cloud-init's user-data; at most 256 KiB", "",
		"user-data, merged over the source's; [other forms](#cloud-init) are kept as they are", setUserData},
	{"VirtletCloudInitUserDataOverwrite", "cloud-init-user-data-overwrite", allowedBool, "`false`",
		"keys in the user-data replace the source's instead of being merged with them; so do SSH keys",
		boolean(func(o *Options) *bool { return &o.UserDataOverwrite })},
	{"VirtletCloudInitUserDataScript", "cloud-init-user-data-script", "a text of at most 256 KiB", "",
		"the whole user-data; `@virtlet-mount-script@` in it is replaced with the commands that link and mount the volumes", setScript},
	{"VirtletCloudInitUserDataSource", "cloud-init-user-data-source", "`configmap/NAME` or `secret/NAME`", "",
		"ConfigMap or Secret, mounted by the pod, whose keys are keys in the user-data (values are YAML)",
		source(false, func(o *Options) *Source { return &o.UserDataSource })},
	{"VirtletCloudInitUserDataSourceKey", "cloud-init-user-data-source-key", "a key in a ConfigMap or Secret", "",
		"key in the source that has the whole user-data", setSourceKey},
	{"VirtletCloudInitUserDataSourceEncoding", "cloud-init-user-data-source-encoding", "`plain` or `base64`", "`plain`",
		"encoding of the value under that key",
		choice(func(o *Options) *string { return &o.UserDataSourceEncoding }, EncodingPlain, EncodingBase64)},
	{"VirtletSSHKeys", "ssh-keys", "lines of an `authorized_keys` file, at most 256 KiB", "",
		"SSH keys of the guest's default user, after those of the source", setSSHKeys},
	{"VirtletSSHKeySource", "ssh-key-source", "`configmap/NAME[/KEY]` or `secret/NAME[/KEY]`", "KEY is `authorized_keys`",
		"ConfigMap or Secret, mounted by the pod, with SSH keys", source(true, func(o *Options) *Source { return &o.SSHKeySource })},
	{"VirtletFilesFromDataSource", "files-from-data-source", "`configmap/NAME` or `secret/NAME`", "",
		"ConfigMap or Secret, mounted by the pod, with files for the guest: key `X` has the content, `X_path` the path, `X_encoding` is `base64` (default) or `plain`", source(false, func(o *Options) *Source { return &o.FilesSource })},
	{"VirtletForceDHCPNetworkConfig", "force-dhcp-network-config", allowedBool, "`false`",
		"the guest gets its addresses by DHCP instead of from cloud-init", boolean(func(o *Options) *bool { return &o.ForceDHCP })},
	{"", "wait-for-agent", allowedBool, "`false`", "StartContainer returns when the guest's agent answers",
		boolean(func(o *Options) *bool { return &o.WaitForAgent })},
	{"", "vnc", allowedBool, "`false`", "a screen and a VNC server, which port-forward reaches at port 5900",
		boolean(func(o *Options) *bool { return &o.VNC })},
	{"", "template", "`cloud-init`", "",
		"the machine continues from a [template](#templates): a machine that was booted until cloud-init was done",
		choice(func(o *Options) *Template { return &o.Template }, TemplateCloudInit)},
}

// maxText is the maximum length of a text in bytes: Kubernetes' limit for all annotations of an object together.
const maxText = 256 << 10

var errTooLong = fmt.Errorf("longer than %d bytes", maxText)

func boolean(field func(*Options) *bool) func(*Options, string) error {
	return func(o *Options, value string) error {
		switch value {
		case "true", "false":
			*field(o) = value == "true"
			return nil
		}
		return errors.New("neither true nor false")
	}
}

func source(withKey bool, field func(*Options) *Source) func(*Options, string) error {
	return func(o *Options, value string) (err error) {
		*field(o), err = parseSource(value, withKey)
		return err
	}
}

func setScript(o *Options, value string) error {
	if len(value) > maxText {
		return errTooLong
	}
	o.UserDataScript = value
	return nil
}

// choice returns a setter for a field with a fixed set of values.
func choice[T ~string](field func(*Options) *T, allowed ...T) func(*Options, string) error {
	return func(o *Options, value string) error {
		if !slices.Contains(allowed, T(value)) {
			return errors.New("no such choice")
		}
		*field(o) = T(value)
		return nil
	}
}

func setImageType(o *Options, value string) error {
	return choice(func(o *Options) *ImageType { return &o.ImageType }, NoCloud, ConfigDrive)(o, strings.ToLower(value))
}

func setSourceKey(o *Options, value string) error {
	o.UserDataSourceKey = value
	if !dataKey().MatchString(value) || value == "." || strings.HasPrefix(value, "..") {
		return errors.New("not a valid key")
	}
	return nil
}
