package volumes

import (
	"fmt"
	"path"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
)

// flexVolume matches the path of a flexVolume: pods/UID/volumes/VENDOR~DRIVER/NAME. The kubelet's own plugins,
// including CSI, have the vendor kubernetes.io.
var flexVolume = lazyregexp.New(`/pods/[^/]+/volumes/([^/~]+)~([^/]+)/([^/]+)(?:/|$)`)

const kubernetesVendor = "kubernetes.io"

// flexDriver returns the driver (VENDOR/DRIVER) and the name of the flexVolume behind a mount, or false if the mount is
// not a flexVolume.
func flexDriver(m *runtimeapi.Mount) (driver, volume string, ok bool) {
	found := flexVolume().FindStringSubmatch(path.Clean(m.GetHostPath()))
	if found == nil || found[1] == kubernetesVendor {
		return "", "", false
	}
	return found[1] + "/" + found[2], found[3], true
}

// virtletDriver is Virtlet's flexVolume driver. The directory of each volume holds only the description of a disk (an
// image file, a device, or a Ceph volume with its secret). Virtlet makes the disk from that description.
const virtletDriver = "virtlet/flexvolume_driver"

// RefuseFlexVolume refuses volumes of Virtlet's driver. If such a volume were shared, the guest would get the
// description of the disk instead of the disk.
func RefuseFlexVolume(field string, m *runtimeapi.Mount) error {
	if driver, volume, ok := flexDriver(m); ok && driver == virtletDriver {
		return fields.Unsupported(field+".host_path",
			"the volume %q is a disk of Virtlet's flexVolume driver, which is not supported; give the machine block devices with volumeDevices, empty disks with the annotation scratch-disks", volume)
	}
	return nil
}

// FlexWarnings returns a warning for each flexVolume, because the guest gets the volume's directory with whatever
// content the driver put there.
func FlexWarnings(mounts []*runtimeapi.Mount) (warnings []string) {
	for _, m := range mounts {
		if driver, volume, ok := flexDriver(m); ok {
			warnings = append(warnings,
				fmt.Sprintf("the flexVolume %q of driver %s, at %s, is shared with the guest as a directory, with whatever content the driver put there", volume, driver, m.GetContainerPath()))
		}
	}
	return warnings
}
