package cri

import (
	"math"
	"strconv"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
)

// nobody is the reported user of components and machines, which never run as root on the node. It is a number because
// the kubelet checks runAsNonRoot only against numbers.
const nobody = 65534

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

// imageUser splits the user of an image's configuration ("user", "uid", "user:group" …; OCI image-spec config) into the
// CRI's form: a UID or a name. A number that is not a valid UID stays a name. No image has a user of that name, so the
// container fails instead of running as another user (CVE-2024-40635).
func imageUser(user string) (uid *runtimeapi.Int64Value, name string) {
	name, _, _ = strings.Cut(user, ":")
	if n, err := strconv.ParseInt(name, 10, 64); err == nil && n >= 0 && n <= math.MaxInt32 {
		return &runtimeapi.Int64Value{Value: n}, ""
	}
	return nil, name
}
