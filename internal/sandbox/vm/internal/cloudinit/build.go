package cloudinit

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/iso9660"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Input is all that a disk is made of. The same input, with the same files behind its mounts, makes the same bytes.
type Input struct {
	Options annotations.Options
	// PodUID is the default instance-id: a new pod of the same name is a new instance. Hostname is the guest's, of RFC 1123.
	PodUID, Hostname string
	// Env is the container's environment.
	Env []EnvVar
	// Mounts are all mounts of the container, in the CRI's order; ShareDriver is how the guest mounts those that are shares.
	Mounts      []Mount
	ShareDriver machine.ShareDriver
	// Devices are block devices for which the guest wants names of its own.
	Devices    []Device
	Interfaces []Interface
	DNS        DNS
	// Agent says that the machine has the disk with the agent.
	Agent bool
}

// EnvVar is a variable of the environment.
type EnvVar struct{ Name, Value string }

// Mount is a mount of the container. Tag is that of the share, by ShareTag, when Classify says KindShare.
type Mount struct {
	HostPath, ContainerPath string
	ReadOnly                bool
	Tag                     string
}

// Device is a disk that the guest is to have at Path. Serial is the disk's serial number: 1 to 20 letters, digits, '-' and
// '_'.
type Device struct{ Serial, Path string }

// Interface is a NIC of the guest, found by its MAC and called Name in it. An interface without addresses is left down.
type Interface struct {
	Name, MAC string
	MTU       int
	Addrs     []netip.Prefix
	Routes    []Route
}

// Route leads to Dst by Via, or over the link when Via is not valid. Metric 0 is the guest's choice.
type Route struct {
	Dst    netip.Prefix
	Via    netip.Addr
	Metric int
}

// DNS configures the guest's resolver.
type DNS struct{ Servers, Search []string }

// ShareTag is the tag of a pod's i-th share.
func ShareTag(i int) string { return fmt.Sprintf("share%d", i) }

// Image is a disk that has been built.
type Image struct {
	// Label is the volume's: "cidata" or "config-2".
	Label string
	Bytes []byte
	// Warnings are sentences for a person: what could not be told the guest.
	Warnings []string
}

// Build makes the disk. What cannot be expressed or is too large is errdefs.ErrInvalidArgument; a file that is not there is
// errdefs.ErrFailedPrecondition.
func Build(in Input) (*Image, error) {
	if err := in.validate(); err != nil {
		return nil, err
	}
	b := &builder{in: in, budget: maxTotal, count: maxFiles}
	files, label := b.noCloud, "cidata"
	if in.Options.ImageType == annotations.ConfigDrive {
		files, label = b.configDrive, "config-2"
	}
	image := &Image{Label: label}
	content, err := files()
	if err != nil {
		return nil, err
	}
	image.Bytes, err = iso9660.Build(label, content)
	image.Warnings = b.warnings
	return image, err
}

// builder is one call of Build.
type builder struct {
	in       Input
	warnings []string
	// budget is how many bytes, count how many files may still be read.
	budget, count int
}

func (b *builder) warn(format string, args ...any) {
	b.warnings = append(b.warnings, fmt.Sprintf(format, args...))
}

func (b *builder) noCloud() ([]iso9660.File, error) {
	p, err := b.parts(b.networkConfig)
	if err != nil {
		return nil, err
	}
	return []iso9660.File{
		{Path: "meta-data", Data: p.meta},
		{Path: "user-data", Data: p.user, Mode: 0o600},
		{Path: "vendor-data", Data: p.vendor},
		{Path: "network-config", Data: p.network},
	}, nil
}

func (b *builder) configDrive() ([]iso9660.File, error) {
	p, err := b.parts(b.networkData)
	if err != nil {
		return nil, err
	}
	vendor, err := encodeJSON(map[string]any{"cloud-init": string(p.vendor)})
	if err != nil {
		return nil, err
	}
	return []iso9660.File{
		{Path: "openstack/latest/meta_data.json", Data: p.meta},
		{Path: "openstack/latest/user_data", Data: p.user, Mode: 0o600},
		{Path: "openstack/latest/vendor_data.json", Data: vendor},
		{Path: "openstack/latest/network_data.json", Data: p.network},
	}, nil
}

// parts are the four texts that a disk of either form has.
type parts struct{ meta, user, vendor, network []byte }

func (b *builder) parts(network func() ([]byte, error)) (p parts, err error) {
	shares, err := b.shares()
	if err != nil {
		return p, err
	}
	if p.meta, err = b.metaData(); err != nil {
		return p, err
	}
	if p.user, err = b.userData(shares); err != nil {
		return p, err
	}
	if p.network, err = network(); err != nil {
		return p, err
	}
	p.vendor = []byte(b.vendorData(shares))
	return p, nil
}

// The forms of what comes from outside and ends in another language.
var (
	hostname     = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?)*$`)
	searchDomain = regexp.MustCompile(`^[-_A-Za-z0-9.]{1,253}$`)
	serial       = regexp.MustCompile(`^[-_A-Za-z0-9]{1,20}$`)
	shareTag     = regexp.MustCompile(`^[-_.A-Za-z0-9:]{1,31}$`)
	linkName     = regexp.MustCompile(`^[-_.A-Za-z0-9]{1,15}$`)
)

func (in *Input) validate() error {
	refuse := func(what, format string, args ...any) error {
		return fmt.Errorf("%s: %s: %w", what, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
	}
	switch {
	case len(in.Hostname) > 253 || !hostname.MatchString(in.Hostname):
		return refuse("hostname", "%q is not a name of RFC 1123", in.Hostname)
	case in.PodUID == "" || strings.ContainsFunc(in.PodUID, control):
		return refuse("pod uid", "%q cannot be an instance-id", in.PodUID)
	}
	for _, m := range in.Mounts {
		if !filepath.IsAbs(m.HostPath) || !filepath.IsAbs(m.ContainerPath) || strings.ContainsFunc(m.ContainerPath, control) {
			return refuse("mount", "%q at %q: both paths must be absolute, and text", m.HostPath, m.ContainerPath)
		}
	}
	for _, d := range in.Devices {
		if !serial.MatchString(d.Serial) || !filepath.IsAbs(d.Path) || filepath.Clean(d.Path) == "/" || strings.ContainsFunc(d.Path, control) {
			return refuse("device", "serial %q, path %q: the serial must be 1 to 20 letters, digits, '-', '_', and the path absolute", d.Serial, d.Path)
		}
	}
	for _, s := range in.DNS.Servers {
		if _, err := netip.ParseAddr(s); err != nil {
			return refuse("DNS server", "%v", err)
		}
	}
	for _, s := range in.DNS.Search {
		if !searchDomain.MatchString(s) {
			return refuse("DNS search domain", "%q is not a domain", s)
		}
	}
	return nil
}

// control reports whether r has no place in a line of text.
func control(r rune) bool {
	return r < ' ' || r == 0x7f || r == 0xfffd || r == 0x85 || r == 0x2028 || r == 0x2029
}

// WriteFile puts the image at path, whole or not at all, also over a power loss. What was there before is replaced.
func (i *Image) WriteFile(path string, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("cloud-init disk: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	_, err = f.Write(i.Bytes)
	for _, step := range []func() error{
		func() error { return f.Chmod(mode) },
		f.Sync,
		f.Close,
		func() error { return os.Rename(f.Name(), path) },
		func() error { return syncDir(filepath.Dir(path)) },
	} {
		if err == nil {
			err = step()
		}
	}
	if err != nil {
		return fmt.Errorf("cloud-init disk %s: %w", path, err)
	}
	return nil
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
