package vm

import (
	"fmt"
	"path"
	"regexp"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/fields"
)

// flexVolume matches what the kubelet mounts of a flexVolume: pods/UID/volumes/VENDOR~DRIVER/NAME. Its own plugins, CSI among
// them, have the vendor kubernetes.io.
var flexVolume = regexp.MustCompile(`/pods/[^/]+/volumes/([^/~]+)~([^/]+)/([^/]+)(?:/|$)`)

// kubernetesVendor is that of the kubelet's own plugins.
const kubernetesVendor = "kubernetes.io"

// flexDriver is the driver of the flexVolume that a mount is of, VENDOR/DRIVER, and the volume's name.
func flexDriver(m *runtimeapi.Mount) (driver, volume string, ok bool) {
	found := flexVolume.FindStringSubmatch(path.Clean(m.GetHostPath()))
	if found == nil || found[1] == kubernetesVendor {
		return "", "", false
	}
	return found[1] + "/" + found[2], found[3], true
}

// virtletDriver is Virtlet's: what it puts into the directory describes a disk (an image file, a device or one of Ceph's, with its
// secret), which Virtlet makes of it.
const virtletDriver = "virtlet/flexvolume_driver"

// refuseFlexVolume refuses Virtlet's volumes: as a shared directory the guest would have the description, and no disk.
func refuseFlexVolume(field string, m *runtimeapi.Mount) error {
	if driver, volume, ok := flexDriver(m); ok && driver == virtletDriver {
		return fields.Unsupported(field+".host_path", "the volume %q is a disk of Virtlet's flexVolume driver, which is not made here; give the machine block devices by volumeDevices, empty disks by the annotation scratch-disks", volume)
	}
	return nil
}

// flexWarnings says which flexVolumes of other drivers are shared as any directory is.
func flexWarnings(mounts []*runtimeapi.Mount) (warnings []string) {
	for _, m := range mounts {
		if driver, volume, ok := flexDriver(m); ok {
			warnings = append(warnings, fmt.Sprintf("the flexVolume %q of the driver %s, at %s, is shared with the guest as a directory, whatever the driver has put there", volume, driver, m.GetContainerPath()))
		}
	}
	return warnings
}
