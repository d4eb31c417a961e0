package annotations

import (
	"errors"
	"fmt"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Annotation is one setting.
type Annotation struct {
	// Virtlet is the key that Virtlet has for it; empty for a setting of ours.
	Virtlet string
	// Name is what follows Prefix in our own key.
	Name string
	// Allowed says which values are, Default what holds without one, Meaning what it does: text for people.
	Allowed, Default, Meaning string

	set func(o *Options, value string) error
}

// Key is our own key of the setting.
func (a *Annotation) Key() string { return Prefix + a.Name }

const allowedBool = `"true" or "false"`

// Known is every setting, in the order of the documentation.
var Known = []*Annotation{
	{"VirtletVCPUCount", "vcpu-count", "a number from 1 to 255", "the node's `[vm] default_cpus`", "number of virtual CPUs", setVCPUs},
	{"VirtletCPUModel", "cpu-model", "`host-model`, or a name that QEMU has for a CPU model (letters, digits, `.`, `_`, `-`; at most 64)", "chosen by the driver", "CPU model of the guest", setCPUModel},
	{"VirtletLibvirtCPUSetting", "libvirt-cpu-setting", "YAML or JSON with the fields of libvirt's `<cpu>`, capitalised (`Mode`, `Match`, `Model: {Fallback, Value}`, `Features` …)", "", "CPU of the libvirt domain; only with `driver = \"libvirt\"`", setLibvirtCPU},
	{"VirtletSystemUUID", "system-uuid", "a UUID in its text form, not of one digit only", "derived from the pod's ID", "SMBIOS system UUID", setSystemUUID},
	{"VirtletDiskDriver", "disk-driver", "`virtio` or `scsi`", "`virtio` (Virtlet: `scsi`)", "bus of the disks", setDiskDriver},
	{"VirtletRootVolumeSize", "root-volume-size", "a Kubernetes quantity from 1 to 64Ti that is a whole number of bytes", "the image's own size", "size of the root disk, rounded up to 512 bytes; one that is below the image's fails CreateContainer (Virtlet: is ignored)", setRootVolumeSize},
	{"", "root-device-overwrite", "`never`, `foreign` or `image`", "`never`", "what a block device at `/` may lose: `foreign` what is no root disk of Tripod's, `image` also the root disk of another image", setRootDeviceOverwrite},
	{"", "scratch-disks", "lines or a comma-separated list of `PATH=SIZE`, at most 8, as `/dev/scratch=10Gi`", "", "empty disks under these names, which go with the container", setScratchDisks},
	{"", "share-driver", "`virtiofs`, `9p` or `9p-mapped`", "`virtiofs` where the node has a virtiofsd that works, else `9p`", "how directories reach the guest: `9p` is for guests whose kernel has no virtio-fs, `9p-mapped` keeps owners for the guest alone", setShareDriver},
	{"VirtletChown9pfsMounts", "chown-9pfs-mounts", allowedBool, "`false`", "none, with a warning: shared directories are not changed, the guest's root is root in them where the file system can map owners", boolean(func(o *Options) *bool { return &o.Chown9pfs })},
	{"VirtletCloudInitImageType", "cloud-init-image-type", "`nocloud` or `configdrive`, in any case", "`nocloud`", "form of the cloud-init disk", setImageType},
	{"VirtletCloudInitMetaData", "cloud-init-meta-data", "a mapping in YAML or JSON, of at most 256 KiB", "", "keys that replace those of the generated meta-data", mapping(func(o *Options) *map[string]any { return &o.MetaData })},
	{"VirtletCloudInitUserData", "cloud-init-user-data", "a mapping in YAML or JSON, of at most 256 KiB", "", "user-data, merged over that of the source", mapping(func(o *Options) *map[string]any { return &o.UserData })},
	{"VirtletCloudInitUserDataOverwrite", "cloud-init-user-data-overwrite", allowedBool, "`false`", "keys of the user-data replace those of the source instead of being merged with them; so do SSH keys", boolean(func(o *Options) *bool { return &o.UserDataOverwrite })},
	{"VirtletCloudInitUserDataScript", "cloud-init-user-data-script", "a text of at most 256 KiB", "", "the whole of the user-data; `@virtlet-mount-script@` in it becomes the commands that link and mount the volumes", setScript},
	{"VirtletCloudInitUserDataSource", "cloud-init-user-data-source", "`configmap/NAME` or `secret/NAME`", "", "ConfigMap or Secret, mounted by the pod, whose keys are keys of the user-data (values are YAML)", source(false, func(o *Options) *Source { return &o.UserDataSource })},
	{"VirtletCloudInitUserDataSourceKey", "cloud-init-user-data-source-key", "a key of a ConfigMap or Secret", "", "key of the source that holds the whole of the user-data", setSourceKey},
	{"VirtletCloudInitUserDataSourceEncoding", "cloud-init-user-data-source-encoding", "`plain` or `base64`", "`plain`", "encoding of the value under that key", setSourceEncoding},
	{"VirtletSSHKeys", "ssh-keys", "lines of an `authorized_keys` file, at most 256 KiB", "", "SSH keys of the guest's default user, after those of the source", setSSHKeys},
	{"VirtletSSHKeySource", "ssh-key-source", "`configmap/NAME[/KEY]` or `secret/NAME[/KEY]`", "KEY is `authorized_keys`", "ConfigMap or Secret, mounted by the pod, with SSH keys", source(true, func(o *Options) *Source { return &o.SSHKeySource })},
	{"VirtletFilesFromDataSource", "files-from-data-source", "`configmap/NAME` or `secret/NAME`", "", "ConfigMap or Secret, mounted by the pod, with files for the guest: `X` is the content, `X_path` where, `X_encoding` `base64` (default) or `plain`", source(false, func(o *Options) *Source { return &o.FilesSource })},
	{"VirtletForceDHCPNetworkConfig", "force-dhcp-network-config", allowedBool, "`false`", "the guest asks by DHCP instead of being told by cloud-init", boolean(func(o *Options) *bool { return &o.ForceDHCP })},
	{"", "wait-for-agent", allowedBool, "`false`", "StartContainer returns when the guest's agent answers", boolean(func(o *Options) *bool { return &o.WaitForAgent })},
	{"", "vnc", allowedBool, "`false`", "a VNC server on a unix socket in the machine's run directory", boolean(func(o *Options) *bool { return &o.VNC })},
}

// maxText bounds a text, in bytes: what Kubernetes allows all annotations of an object together.
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

func mapping(field func(*Options) *map[string]any) func(*Options, string) error {
	return func(o *Options, value string) (err error) {
		*field(o), err = Mapping(value)
		return err
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

func setDiskDriver(o *Options, value string) error {
	switch b := machine.Bus(value); b {
	case machine.BusVirtio, machine.BusSCSI:
		o.DiskBus = b
		return nil
	}
	return errors.New("no such bus")
}

func setShareDriver(o *Options, value string) error {
	switch d := machine.ShareDriver(value); d {
	case machine.ShareVirtiofs, machine.Share9p, machine.Share9pMapped:
		o.ShareDriver = d
		return nil
	}
	return errors.New("no such driver")
}

func setImageType(o *Options, value string) error {
	switch t := ImageType(strings.ToLower(value)); t {
	case NoCloud, ConfigDrive:
		o.ImageType = t
		return nil
	}
	return errors.New("no such form")
}

func setSourceKey(o *Options, value string) error {
	o.UserDataSourceKey = value
	if !dataKey.MatchString(value) || value == "." || strings.HasPrefix(value, "..") {
		return errors.New("no such key can be")
	}
	return nil
}

func setSourceEncoding(o *Options, value string) error {
	o.UserDataSourceEncoding = value
	if value != EncodingPlain && value != EncodingBase64 {
		return errors.New("no such encoding")
	}
	return nil
}
