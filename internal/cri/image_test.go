package cri

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/image/registry"
)

func spec(name string) *runtimeapi.ImageSpec { return &runtimeapi.ImageSpec{Image: name} }

// One image has one name in every call (PullImageResponse.image_ref, proto of v1.36).
func TestImageIDIsTheSameEverywhere(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	pulled, err := d.PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec("nginx:1.25")})
	must(t, err)
	id := pulled.GetImageRef()
	for _, name := range []string{"nginx:1.25", "docker.io/library/nginx:1.25", id} {
		s, err := d.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: spec(name)})
		must(t, err)
		wantEqual(t, name, s.GetImage().GetId(), id)
		l, err := d.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: spec(name)}})
		must(t, err)
		wantIDs(t, ids(l.GetImages()), []string{id})
	}
	c := d.container(t, d.pod(t, "p"), "c", func(c *runtimeapi.ContainerConfig) { c.Image = spec(id) })
	wantEqual(t, "ContainerStatus.image_id", d.status(t, c).GetImageId(), id)
	list, err := d.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	must(t, err)
	wantEqual(t, "Container.image_id", list.GetContainers()[0].GetImageId(), id)

	_, err = d.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: spec("nginx:1.25")})
	must(t, err)
	l, err := d.ListImages(ctx, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: spec(id)}})
	must(t, err)
	wantEqual(t, "images after the removal", len(l.GetImages()), 0)
	l, err = d.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	must(t, err)
	wantEqual(t, "images that were not removed", len(l.GetImages()), 1)
	_, err = d.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{})
	wantCode(t, err, codes.InvalidArgument, "image.image")
}

func TestImageStatusVerbose(t *testing.T) {
	d := open(t)
	r, err := d.ImageStatus(t.Context(), &runtimeapi.ImageStatusRequest{Image: spec("busybox"), Verbose: true})
	must(t, err)
	var info struct{ ImageSpec any }
	must(t, json.Unmarshal([]byte(r.GetInfo()["info"]), &info))
	if info.ImageSpec == nil {
		t.Errorf("info %q has no configuration", r.GetInfo())
	}
}

// A kubelet refuses runAsNonRoot for an image without a user, or with a user's name, so images that never run as root
// have a number.
func TestImagesThatNeverRunAsRoot(t *testing.T) {
	wasm := &image.Component{Layout: image.LayoutRootfs, Entrypoint: "/app.wasm"}
	for name, c := range map[string]struct {
		img  image.Image
		want *runtimeapi.Int64Value
	}{
		"component":                {image.Image{Kind: image.KindComponent, Component: &image.Component{}}, id(nobody)},
		"component in a rootfs":    {image.Image{Kind: image.KindRootfs, Component: wasm, User: "root"}, id(nobody)},
		"disk":                     {image.Image{Kind: image.KindDisk}, id(nobody)},
		"container":                {image.Image{Kind: image.KindRootfs}, nil},
		"container with its user":  {image.Image{Kind: image.KindRootfs, User: "1000"}, id(1000)},
		"container that says root": {image.Image{Kind: image.KindRootfs, User: "0"}, id(0)},
	} {
		got := imageMessage(&c.img)
		if !proto.Equal(got.GetUid(), c.want) || got.GetUsername() != "" {
			t.Errorf("%s: got uid %v and username %q, want uid %v", name, got.GetUid(), got.GetUsername(), c.want)
		}
	}
}

func TestImageUser(t *testing.T) {
	for user, want := range map[string]string{
		"": "uid=<nil> name=", "1002": "uid=1002 name=", "1002:users": "uid=1002 name=", "0": "uid=0 name=",
		"www-data": "uid=<nil> name=www-data", "www-data:100": "uid=<nil> name=www-data",
		// CVE-2024-40635, CVE-2026-47262: a number that is not a UID is not truncated to one.
		"2147483648": "uid=<nil> name=2147483648", "4294967296": "uid=<nil> name=4294967296", "-1": "uid=<nil> name=-1",
		"99999999999999999999": "uid=<nil> name=99999999999999999999",
	} {
		uid, name := imageUser(user)
		got := fmt.Sprintf("uid=<nil> name=%s", name)
		if uid != nil {
			got = fmt.Sprintf("uid=%d name=%s", uid.GetValue(), name)
		}
		wantEqual(t, user, got, want)
	}
}

// The kubelet's client strips the code only for Unknown, and the kubelet compares the beginning of the text.
func TestPullErrors(t *testing.T) {
	d := open(t)
	pull := func(err error) error {
		d.images.pullError = err
		_, err = d.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: spec("r.example/x")})
		return err
	}
	err := pull(fmt.Errorf("dial tcp: connection refused: %w", errdefs.ErrUnavailable))
	wantCode(t, err, codes.Unknown)
	if !strings.HasPrefix(status.Convert(err).Message(), "RegistryUnavailable: ") {
		t.Errorf("message %q does not begin with RegistryUnavailable", status.Convert(err).Message())
	}
	wantCode(t, pull(fmt.Errorf("no such tag: %w", errdefs.ErrNotFound)), codes.NotFound)
	wantCode(t, pull(fmt.Errorf("login: %w", errdefs.ErrUnauthenticated)), codes.Unauthenticated)
	wantCode(t, pull(fmt.Errorf("disk full: %w", errdefs.ErrResourceExhausted)), codes.ResourceExhausted)
	wantCode(t, pull(errors.New("disk on fire")), codes.Unknown)
}

func TestLogin(t *testing.T) {
	if a := login(nil); a != nil {
		t.Errorf("login(nil) = %v, want nil", a)
	}
	if a := login(&runtimeapi.AuthConfig{ServerAddress: "r.example"}); a != nil {
		t.Errorf("login with an address alone = %v, want nil", a)
	}
	d := open(t)
	_, err := d.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: spec("x"), Auth: &runtimeapi.AuthConfig{
		Username: "u", Password: "p", Auth: "a", ServerAddress: "s", IdentityToken: "i", RegistryToken: "r"}})
	must(t, err)
	want := registry.Auth{Username: "u", Password: "p", Auth: "a", ServerAddress: "s", IdentityToken: "i", RegistryToken: "r"}
	if d.images.auth == nil || *d.images.auth != want {
		t.Errorf("credentials at the image store: got %v, want %v", d.images.auth, want)
	}
}

func TestImageFsInfo(t *testing.T) {
	d := open(t)
	r, err := d.ImageFsInfo(t.Context(), &runtimeapi.ImageFsInfoRequest{})
	must(t, err)
	for name, fs := range map[string][]*runtimeapi.FilesystemUsage{"images": r.GetImageFilesystems(),
		"containers": r.GetContainerFilesystems()} {
		if len(fs) != 1 || fs[0].GetTimestamp() <= 0 || fs[0].GetUsedBytes().GetValue() == 0 || fs[0].GetInodesUsed().GetValue() == 0 ||
			fs[0].GetFsId().GetMountpoint() == "" {
			t.Errorf("%s: got usage %v, want all its fields", name, fs)
		}
	}
}
