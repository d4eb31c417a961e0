package image

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/test/until"
)

// foundations lists the chain IDs of the foundations that exist.
func foundations(t *testing.T, s *Store) (chains []string) {
	t.Helper()
	check(t, s.snaps.Walk(s.withNamespace(t.Context()), func(_ context.Context, info snapshots.Info) error {
		if chain, ok := strings.CutPrefix(info.Name, foundationPrefix); ok {
			chains = append(chains, chain)
		}
		return nil
	}))
	return chains
}

// TestFoundations: an image with containers has one foundation, which goes with the last of the image and its containers.
func TestFoundations(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	want := func(when string, chains ...string) {
		t.Helper()
		if got := foundations(t, s); !slices.Equal(got, chains) {
			t.Errorf("foundations %s: %v, want %v", when, got, chains)
		}
	}
	want("without containers")
	for _, key := range []string{"c1", "c2"} {
		_, err := s.Prepare(t.Context(), key, img.ID, nil)
		check(t, err)
	}
	check(t, s.Release(t.Context(), "c1"))
	check(t, s.Release(t.Context(), "c2"))
	want("after the last container", img.ChainID)
	_, err := s.Prepare(t.Context(), "c3", img.ID, nil)
	check(t, err)
	check(t, s.Remove(t.Context(), img.ID))
	want("after the image", img.ChainID)
	check(t, s.Release(t.Context(), "c3"))
	want("after both")
	check(t, s.Collect(t.Context()))
	wantEmpty(t, s)
}

// TestFoundationsGo: a foundation goes although its removal, with the image or the last container, failed at first.
func TestFoundationsGo(t *testing.T) {
	failpoint.Needed(t)
	reg, s := newRegistry(t), open(t, Config{})
	ref := reg.push(t, "app:1", oneFileImage(t, "x"))
	const point = "image.remove.foundation"
	for _, imageFirst := range []bool{false, true} {
		img := pull(t, s, ref)
		_, err := s.Prepare(t.Context(), "c", img.ID, nil)
		check(t, err)
		steps := []func() error{
			func() error { return s.Release(t.Context(), "c") },
			func() error { return s.Remove(t.Context(), img.ID) },
		}
		if imageFirst {
			slices.Reverse(steps)
		}
		check(t, steps[0]())
		check(t, failpoint.Arm(point, "1*error(no)"))
		check(t, steps[1]())
		until.Holds(t, "the removal of the foundation", func() bool { return len(foundations(t, s)) == 0 })
		check(t, failpoint.Arm(point, ""))
	}
	check(t, s.Collect(t.Context()))
	wantEmpty(t, s)
}

// TestLayersAfterACrash: half-made and half-removed layers go at the next start, and a damaged one can be released.
func TestLayersAfterACrash(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "1")), tarOf(t, file("b", "2")))))
	for _, key := range []string{"whole", "damaged"} {
		_, err := s.Prepare(t.Context(), key, img.ID, nil)
		check(t, err)
	}
	check(t, s.Close())
	dir := filepath.Join(s.cfg.Root, containersDir)
	check(t, os.WriteFile(filepath.Join(dir, "damaged", layerFile), nil, 0o600))
	for _, name := range []string{beingMade + "c1", beingRemoved + "c2"} {
		check(t, os.MkdirAll(filepath.Join(dir, name, "fs", "below"), 0o700))
	}
	s = open(t, Config{Root: s.cfg.Root})
	if _, err := s.Mounts(t.Context(), "damaged"); !errdefs.IsNotFound(err) {
		t.Errorf("Mounts of a damaged layer: got error %v, want not found", err)
	}
	if keys, err := s.Snapshots(t.Context()); err != nil || len(keys) != 2 {
		t.Errorf("Snapshots() = %q, %v; want both layers", keys, err)
	}
	check(t, s.Release(t.Context(), "damaged"))
	mounts, err := s.Prepare(t.Context(), "whole", img.ID, nil)
	check(t, err)
	if root := mounted(t, mounts); read(t, root+"/a")+read(t, root+"/b") != "12" {
		t.Error("the image's files are missing")
	}
	until.Holds(t, "the removal of leftovers", func() bool {
		entries, err := os.ReadDir(dir)
		return err == nil && len(entries) == 1 && entries[0].Name() == "whole"
	})
}

// TestLayersOfEarlierVersions: a container's layer that is a snapshot is served until it is released.
func TestLayersOfEarlierVersions(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	img := pull(t, s, reg.push(t, "app:1", oneFileImage(t, "x")))
	_, err := s.snaps.Prepare(s.withNamespace(t.Context()), "old", img.ChainID, snapshots.WithLabels(ownLabels(ownerWritable)))
	check(t, err)
	mounts, err := s.Prepare(t.Context(), "old", img.ID, nil)
	check(t, err)
	if upper, _ := layer.OverlayDirs(mounts[0]); !strings.HasPrefix(upper, filepath.Join(s.cfg.Root, "snapshots")) {
		t.Errorf("upper directory of the old layer = %q, want its snapshot's", upper)
	}
	if keys, err := s.Snapshots(t.Context()); err != nil || !slices.Equal(keys, []string{"old"}) {
		t.Errorf("Snapshots() = %q, %v; want old", keys, err)
	}
	check(t, s.Release(t.Context(), "old"))
	if keys, err := s.Snapshots(t.Context()); err != nil || len(keys) > 0 {
		t.Errorf("Snapshots() = %q, %v; want none", keys, err)
	}
}
