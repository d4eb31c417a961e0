package mnt

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/mount"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// MappedLayer is a container's writable layer in a pod with a user namespace.
type MappedLayer struct {
	// Dir is where the layer is mounted.
	Dir string
	// Marks is the directory of the files that say whether the image's files were copied to the layer.
	Marks string
	// IDs are the pod's.
	IDs sandbox.IDMap
}

// copiedFile marks a layer whose image could not be mapped to the pod's user namespace, and copyingFile one whose
// image's files are still being copied.
func (l MappedLayer) copiedFile() string  { return filepath.Join(l.Marks, "copied") }
func (l MappedLayer) copyingFile() string { return filepath.Join(l.Marks, "copying") }

// Copied reports whether the image's files were copied.
func (l MappedLayer) Copied() bool { return ledger.Exists(l.copiedFile()) }

// Mount mounts the layer. If the layers below cannot be mapped to the given user namespace, it changes the owners of all
// files instead, which copies them to the layer, and leaves a mark.
func (l MappedLayer) Mount(ctx context.Context, mounts []mount.Mount, users *os.File, log *slog.Logger) error {
	if err := ledger.RemoveFile(l.copyingFile()); err != nil { // of an interrupted attempt
		return err
	}
	if upper := optionOf(mounts, "upperdir"); upper != "" {
		if err := shiftOwner(upper, l.IDs); err != nil {
			return err
		}
		err := mountMapped(mounts[0].Options, users, l.Dir)
		if err == nil || !cannotMap(err) {
			return err
		}
		log.Warn("the image's layers cannot be mapped to the pod's users; copying all files to the container's layer", "err", err)
	}
	if err := os.WriteFile(l.copyingFile(), nil, 0o600); err != nil {
		return err
	}
	if err := Mount(mounts, l.Dir); err != nil {
		return err
	}
	if err := l.ContinueCopy(ctx); err != nil {
		return errors.Join(err, Unmount(l.Dir))
	}
	return nil
}

// ContinueCopy copies the files of a mounted image if that has begun and has not ended.
func (l MappedLayer) ContinueCopy(ctx context.Context) error {
	if !ledger.Exists(l.copyingFile()) {
		return nil
	}
	if err := shiftOwners(ctx, l.Dir, l.IDs); err != nil {
		return err
	}
	return os.Rename(l.copyingFile(), l.copiedFile())
}
