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

// runs pulls an image and runs it, as far as it goes; the error is what it was refused with.
func (g *ground) runs(t *testing.T, image, handler string) (*harness.Container, error) {
	t.Helper()
	if _, err := g.d.ImageCRI().PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: image}}); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if _, err := g.d.ImageCRI().RemoveImage(context.Background(), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image}}); err != nil {
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
	resp, err := g.d.CRI().CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod.ID, Config: config, SandboxConfig: pod.Config})
	if err != nil {
		return nil, err
	}
	c := &harness.Container{ID: resp.ContainerId, Config: config, Pod: pod}
	_, err = g.d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c.ID})
	return c, err
}

// wantRefusal checks that an image was refused for what it is, and not by an accident.
func wantRefusal(t *testing.T, err error) {
	t.Helper()
	switch status.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.ResourceExhausted, codes.DataLoss:
	default:
		t.Errorf("not refused for what it is: %v", err)
	}
}

func TestImage(t *testing.T) {
	o := newOrigin(t)
	g := open(t, o.option(t))
	// Those of the harness are one case: the connections to its registry are kept for half a minute.
	g.attack("bad artifacts", func(t *testing.T) {
		for image, handler := range map[string]string{
			harness.BackingDisk: "vm", harness.TwoDisks: "vm", harness.Httpd: "vm",
			harness.InvalidWasm: "wasm", harness.MismatchWasm: "wasm", harness.UnknownImportWasm: "wasm",
		} {
			if _, err := g.runs(t, image, handler); err == nil {
				t.Errorf("%s runs", image)
			} else {
				wantRefusal(t, err)
			}
		}
		c, err := g.runs(t, harness.HugeMemoryWasm, "wasm")
		if err != nil {
			wantRefusal(t, err)
			return
		}
		harness.Eventually(t, waitLimit, func() error {
			if s := c.Status(); s.Reason != "OOMKilled" {
				return fmt.Errorf("%v: %s", s.State, s.Reason)
			}
			return nil
		})
	})
	// The library that looks into roots keeps a handle of /proc from the first one on.
	g.Run("first", func(t *testing.T) { _, _ = g.runs(t, harness.Symlinks, "") })
	g.attack("bad roots", func(t *testing.T) {
		for _, image := range []string{harness.HostileIDs, harness.Symlinks} {
			if c, err := g.runs(t, image, ""); err != nil {
				wantRefusal(t, err)
			} else {
				refused(t, c, "ls /proc/1/root"+g.d.Root)
			}
		}
	})
	for name, image := range map[string]string{
		"out by a path":      o.push(t, "dotdot", layer(t, &tar.Header{Name: "../../../../../../" + marker, Typeflag: tar.TypeReg})),
		"out by a hard link": o.push(t, "hardlink", layer(t, &tar.Header{Name: "passwd", Typeflag: tar.TypeLink, Linkname: "../../../../../../../etc/passwd"})),
		"out by a symlink":   o.push(t, "symlink", layer(t, &tar.Header{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "/"}, &tar.Header{Name: "out/" + marker, Typeflag: tar.TypeReg})),
		"disk of the node":   o.push(t, "device", layer(t, &tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Devmajor: 254})),
		"bomb":               o.push(t, "bomb", bomb(t)),
		"cut off":            o.push(t, "cut", layer(t, &tar.Header{Name: "file", Typeflag: tar.TypeReg, Size: 100_000})[:80]),
		"junk":               o.push(t, "junk", []byte(strings.Repeat("junk", 1000))),
		"nested":             o.pushNested(t),
	} {
		g.attack(name, func(t *testing.T) {
			t.Cleanup(o.server.CloseClientConnections)
			if c, err := g.runs(t, image, ""); err != nil {
				wantRefusal(t, err)
			} else { // it was made harmless
				refused(t, c, "ls "+g.d.Root, "ls "+filepath.Join("/proc/1/root", g.d.Root), "grep -q root: /passwd && false", "head -c 1 /disk")
			}
			if _, err := os.Stat("/" + marker); err == nil {
				t.Error("a file of the image is on the node")
				_ = os.Remove("/" + marker)
			}
		})
	}
}

// marker is the name of a file that must not come to be in the root of the node.
const marker = "tripod-attack-marker"

// layer is a layer of such entries.
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

// bomb is a layer of 64 MiB with a file of 64 GiB.
func bomb(t *testing.T) []byte {
	t.Helper()
	// One mebibyte of zeros as a member of its own; members of gzip may follow each other.
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
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, host), 0o755), os.WriteFile(filepath.Join(dir, host, "hosts.toml"), []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}
