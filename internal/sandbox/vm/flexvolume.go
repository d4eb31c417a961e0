package vm

import (
	"fmt"
	"path"
	"regexp"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/fields"
)

// flexVolume matches the path of a flexVolume: pods/UID/volumes/VENDOR~DRIVER/NAME. The kubelet's own plugins, CSI among them,
// have the vendor kubernetes.io.
var flexVolume = regexp.MustCompile(`/pods/[^/]+/volumes/([^/~]+)~([^/]+)/([^/]+)(?:/|$)`)

const kubernetesVendor = "kubernetes.io"

// flexDriver returns the driver (VENDOR/DRIVER) and the name of the flexVolume behind a mount.
func flexDriver(m *runtimeapi.Mount) (driver, volume string, ok bool) {
	found := flexVolume.FindStringSubmatch(path.Clean(m.GetHostPath()))
	if found == nil || found[1] == kubernetesVendor {
		return "", "", false
	}
	return found[1] + "/" + found[2], found[3], true
}

// virtletDriver is Virtlet's driver. The directory holds a description of a disk (an image file, a device, or a Ceph volume with
// its secret), which Virtlet turns into the disk.
const virtletDriver = "virtlet/flexvolume_driver"

// refuseFlexVolume refuses Virtlet's volumes: a guest that shared the directory would get the description instead of the disk.
func refuseFlexVolume(field string, m *runtimeapi.Mount) error {
	if driver, volume, ok := flexDriver(m); ok && driver == virtletDriver {
		return fields.Unsupported(field+".host_path", "the volume %q is a disk of Virtlet's flexVolume driver, which is not made here; give the machine block devices by volumeDevices, empty disks by the annotation scratch-disks", volume)
	}
	return nil
}

// flexWarnings lists the flexVolumes of other drivers, which are shared as directories.
func flexWarnings(mounts []*runtimeapi.Mount) (warnings []string) {
	for _, m := range mounts {
		if driver, volume, ok := flexDriver(m); ok {
			warnings = append(warnings, fmt.Sprintf("the flexVolume %q of the driver %s, at %s, is shared with the guest as a directory, whatever the driver has put there", volume, driver, m.GetContainerPath()))
		}
	}
	return warnings
}
