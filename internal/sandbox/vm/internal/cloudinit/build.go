package cloudinit

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/iso9660"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Input holds everything that goes into a disk. The same input, with the same files in the mounts, yields an identical
// disk.
type Input struct {
	Options annotations.Options
	// PodUID is the default instance-id, so that a new pod with the same name is a new instance for cloud-init.
	PodUID string
	// Hostname is the guest's host name (RFC 1123).
	Hostname string
	// Env is the container's environment.
	Env []EnvVar
	// Mounts are all mounts of the container, in the CRI's order. ShareDriver shares directories with the guest.
	Mounts      []Mount
	ShareDriver machine.ShareDriver
	// Devices are the block devices that need a path in the guest.
	Devices    []Device
	Interfaces []Interface
	DNS        DNS
	// Agent means that the machine has the disk with the agent.
	Agent bool
}

// EnvVar is an environment variable.
type EnvVar struct{ Name, Value string }

// Mount is a mount of the container.
type Mount struct {
	HostPath, ContainerPath string
	ReadOnly                bool
	// Tag is the share's tag, made by ShareTag. Only mounts of the kind KindShare need one.
	Tag string
}

// Device is a disk with the serial number Serial (1 to 20 letters, digits, '-' and '_'). In the guest, Path becomes a
// link to the disk.
type Device struct{ Serial, Path string }

// Interface is one of the guest's NICs. The guest finds the NIC by its MAC and renames it to Name. A NIC without
// addresses stays down.
type Interface struct {
	Name, MAC string
	MTU       int
	Addrs     []netip.Prefix
	Routes    []Route
}

// Route is a route to Dst through the gateway Via, or directly on the link if Via is not valid. Metric 0 is the guest's
// default.
type Route struct {
	Dst    netip.Prefix
	Via    netip.Addr
	Metric int
}

// DNS configures the guest's resolver.
type DNS struct{ Servers, Search []string }

// ShareTag returns the tag of a pod's i-th share.
func ShareTag(i int) string { return fmt.Sprintf("share%d", i) }

// Image is a built disk.
type Image struct {
	// Label is the volume label: "cidata" or "config-2".
	Label string
	Bytes []byte
	// Warnings are sentences that say which settings the guest does not get.
	Warnings []string
}

// WriteFile replaces the file at path with the image, as atomicfile.Write does.
func (i *Image) WriteFile(path string, mode os.FileMode) error {
	return atomicfile.Write(path, i.Bytes, mode)
}

// Build makes the disk. It returns errdefs.ErrInvalidArgument if the input is too large or cannot be expressed for
// cloud-init, and errdefs.ErrFailedPrecondition if a file is missing.
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

// builder is the state of one call to Build.
type builder struct {
	in       Input
	warnings []string
	// budget is the number of bytes, and count the number of files, that may still be read from mounts.
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

// parts are the four files on a disk of either form.
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

// Allowed forms of text that comes from outside and becomes part of a shell script, YAML or JSON.
var (
	hostname     = lazyregexp.New(`^[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?)*$`)
	searchDomain = lazyregexp.New(`^[-_A-Za-z0-9.]{1,253}$`)
	serial       = lazyregexp.New(`^[-_A-Za-z0-9]{1,20}$`)
	shareTag     = lazyregexp.New(`^[-_.A-Za-z0-9:]{1,31}$`)
	linkName     = lazyregexp.New(`^[-_.A-Za-z0-9]{1,15}$`)
)

func (in *Input) validate() error {
	refuse := func(what, format string, args ...any) error {
		return fmt.Errorf("%s: %s: %w", what, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
	}
	switch {
	case len(in.Hostname) > 253 || !hostname().MatchString(in.Hostname):
		return refuse("hostname", "%q is not a name of RFC 1123", in.Hostname)
	case in.PodUID == "" || strings.ContainsFunc(in.PodUID, isControl):
		return refuse("pod uid", "%q cannot be an instance-id", in.PodUID)
	}
	for _, m := range in.Mounts {
		if !filepath.IsAbs(m.HostPath) || !filepath.IsAbs(m.ContainerPath) || strings.ContainsFunc(m.ContainerPath, isControl) {
			return refuse("mount", "%q at %q: both paths must be absolute and without control characters", m.HostPath, m.ContainerPath)
		}
	}
	for _, d := range in.Devices {
		if !serial().MatchString(d.Serial) || !filepath.IsAbs(d.Path) || filepath.Clean(d.Path) == "/" ||
			strings.ContainsFunc(d.Path, isControl) {
			return refuse("device", "serial %q, path %q: the serial must be 1 to 20 letters, digits, '-', '_', and the path absolute", d.Serial,
				d.Path)
		}
	}
	for _, s := range in.DNS.Servers {
		if _, err := netip.ParseAddr(s); err != nil {
			return refuse("DNS server", "%v", err)
		}
	}
	for _, s := range in.DNS.Search {
		if !searchDomain().MatchString(s) {
			return refuse("DNS search domain", "%q is not a domain", s)
		}
	}
	return nil
}

// isControl reports whether r must not occur in a line of text.
func isControl(r rune) bool {
	return r < ' ' || r == 0x7f || r == 0xfffd || r == 0x85 || r == 0x2028 || r == 0x2029
}

// Neutral returns the part of the input for which machines need different templates.
func (in Input) Neutral() Input {
	options := annotations.Options{
		ImageType: in.Options.ImageType, UserData: in.Options.UserData, UserDataDocument: in.Options.UserDataDocument,
		UserDataScript: in.Options.UserDataScript, MetaData: in.Options.MetaData,
	}
	return Input{Options: options, PodUID: "template", Hostname: "template", Agent: in.Agent}
}
