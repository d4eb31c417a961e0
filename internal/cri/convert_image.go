package cri

import (
	"math"
	"strconv"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
)

// nobody is the user of images that have none: nothing of a component or a machine runs on the node as root. A number, since the
// kubelet holds runAsNonRoot against nothing else.
const nobody = 65534

// imageMessage describes an image.
func imageMessage(img *image.Image) *runtimeapi.Image {
	uid, username := imageUser(img.User)
	if img.Component != nil || img.Kind == image.KindDisk {
		uid, username = &runtimeapi.Int64Value{Value: nobody}, ""
	}
	return &runtimeapi.Image{
		Id: img.ID, RepoTags: img.RepoTags, RepoDigests: img.RepoDigests, Size: img.Size, Uid: uid, Username: username,
		Spec: &runtimeapi.ImageSpec{Image: img.ID, Annotations: img.Annotations}, Pinned: img.Pinned,
	}
}

// imageUser splits the user of an image's configuration ("user", "uid", "user:group" …; OCI image-spec config) into
// what the CRI has: a UID, or else a name. A number that is no UID stays a name, which no image has: the container
// then fails by it instead of running as somebody else (CVE-2024-40635).
func imageUser(user string) (uid *runtimeapi.Int64Value, name string) {
	name, _, _ = strings.Cut(user, ":")
	if n, err := strconv.ParseInt(name, 10, 64); err == nil && n >= 0 && n <= math.MaxInt32 {
		return &runtimeapi.Int64Value{Value: n}, ""
	}
	return nil, name
}
