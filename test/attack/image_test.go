package attack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// run pulls an image and runs it. It returns the error of the first call that is refused.
func (g *ground) run(t *testing.T, image, handler string) (*harness.Container, error) {
	t.Helper()
	if _, err := g.d.ImageCRI().PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: image}}); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if _, err := g.d.ImageCRI().RemoveImage(context.Background(),
			&runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image}}); err != nil {
			t.Error(err)
		}
	})
	pod := g.d.RunPodWith(t, harness.PodConfig(t, "attacker-image"), handler)
	t.Cleanup(pod.Remove)
	config := harness.ContainerConfig("c", image)
	config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: podMemory}
	if handler == "" {
		harness.Sleep()(config)
	}
	resp, err := g.d.CRI().CreateContainer(t.Context(),
		&runtimeapi.CreateContainerRequest{PodSandboxId: pod.ID, Config: config, SandboxConfig: pod.Config})
	if err != nil {
		return nil, err
	}
	c := &harness.Container{ID: resp.ContainerId, Config: config, Pod: pod}
	_, err = g.d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c.ID})
	return c, err
}

// wantRefusal checks that err refuses the image itself, rather than reporting an internal error.
func wantRefusal(t *testing.T, err error) {
	t.Helper()
	switch status.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.ResourceExhausted, codes.DataLoss:
	default:
		t.Errorf("got error %v, want a code that refuses the image", err)
	}
}

func TestImage(t *testing.T) {
	o := newOrigin(t)
	g := open(t, o.option(t))
	// The harness's images are one case, because connections to its registry stay open for half a minute.
	g.attack("bad artifacts", func(t *testing.T) {
		for image, handler := range map[string]string{
			harness.BackingDisk: "vm", harness.TwoDisks: "vm", harness.Httpd: "vm",
			harness.InvalidWasm: "wasm", harness.MismatchWasm: "wasm", harness.UnknownImportWasm: "wasm",
		} {
			if _, err := g.run(t, image, handler); err == nil {
				t.Errorf("%s runs, want a refusal", image)
			} else {
				wantRefusal(t, err)
			}
		}
		c, err := g.run(t, harness.HugeMemoryWasm, "wasm")
		if err != nil {
			wantRefusal(t, err)
			return
		}
		harness.Eventually(t, waitLimit, func() error {
			if s := c.Status(); s.Reason != "OOMKilled" {
				return fmt.Errorf("status: got %v, reason %q; want reason OOMKilled", s.State, s.Reason)
			}
			return nil
		})
	})
	// The library that opens files in root file systems keeps a handle of /proc after its first use.
	g.Run("first", func(t *testing.T) { _, _ = g.run(t, harness.Symlinks, "") })
	g.attack("bad roots", func(t *testing.T) {
		for _, image := range []string{harness.HostileIDs, harness.Symlinks} {
			if c, err := g.run(t, image, ""); err != nil {
				wantRefusal(t, err)
			} else {
				refused(t, c, "ls /proc/1/root"+g.d.Root)
			}
		}
	})
	for name, image := range map[string]string{
		"out by a path": o.push(t, "dotdot", layer(t, &tar.Header{Name: "../../../../../../" + marker, Typeflag: tar.TypeReg})),
		"out by a hard link": o.push(t, "hardlink",
			layer(t, &tar.Header{Name: "passwd", Typeflag: tar.TypeLink, Linkname: "../../../../../../../etc/passwd"})),
		"out by a symlink": o.push(t, "symlink",
			layer(t, &tar.Header{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "/"}, &tar.Header{Name: "out/" + marker, Typeflag: tar.TypeReg})),
		"disk of the node": o.push(t, "device", layer(t, &tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Devmajor: 254})),
		"bomb":             o.push(t, "bomb", bomb(t)),
		"cut off":          o.push(t, "cut", layer(t, &tar.Header{Name: "file", Typeflag: tar.TypeReg, Size: 100_000})[:80]),
		"junk":             o.push(t, "junk", []byte(strings.Repeat("junk", 1000))),
		"nested":           o.pushNested(t),
	} {
		g.attack(name, func(t *testing.T) {
			t.Cleanup(o.server.CloseClientConnections)
			if c, err := g.run(t, image, ""); err != nil {
				wantRefusal(t, err)
			} else { // the image was accepted, so it must be harmless
				refused(t, c, "ls "+g.d.Root, "ls "+filepath.Join("/proc/1/root", g.d.Root), "grep -q root: /passwd && false", "head -c 1 /disk")
			}
			if _, err := os.Stat("/" + marker); err == nil {
				t.Error("the image created a file in the node's root directory")
				_ = os.Remove("/" + marker)
			}
		})
	}
}

// marker is the name of a file that images try to create in the node's root directory.
const marker = "tripod-attack-marker"

// layer returns a layer with these entries.
func layer(t *testing.T, entries ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	tw := tar.NewWriter(w)
	for _, h := range entries {
		h.Mode, h.ModTime = 0o666, time.Unix(1, 0)
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(tw, zeros{}, h.Size); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.Close(), w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// bomb returns a layer of 64 MiB with a file of 64 GiB.
func bomb(t *testing.T) []byte {
	t.Helper()
	// The file consists of copies of one gzip member of zeros, which the format allows.
	var head, member bytes.Buffer
	w := gzip.NewWriter(&head)
	tw := tar.NewWriter(w)
	const size, piece = 64 << 30, 64 << 20
	if err := tw.WriteHeader(&tar.Header{Name: "fill", Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(tw.Flush(), w.Close()); err != nil && !strings.Contains(err.Error(), "missed writing") {
		t.Fatal(err)
	}
	m := gzip.NewWriter(&member)
	if _, err := io.CopyN(m, zeros{}, piece); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	return append(head.Bytes(), bytes.Repeat(member.Bytes(), size/piece)...)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func hostsFile(t *testing.T, dir, host, url string) {
	t.Helper()
	text := fmt.Sprintf("server = %[1]q\n[host.%[1]q]\ncapabilities = [\"pull\", \"resolve\"]\n", url)
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, host), 0o755),
		os.WriteFile(filepath.Join(dir, host, "hosts.toml"), []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}
