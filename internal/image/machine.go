package image

import (
	"context"
	"errors"
	"fmt"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// Machine describes an image's boot files for virtual machines, judged by their content and never by a label.
//
// Errors: errdefs.ErrInvalidArgument with the reason if a machine cannot use the image, for example a qcow2 image that
// names another file (fault I5); ErrNotFound for an unknown image; ErrDataLoss for a damaged one.
func (s *Store) Machine(ctx context.Context, imageID string) (*disk.MachineImage, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	e, err := s.index.find(imageID)
	if err != nil {
		return nil, err
	}
	if known, ok := s.machines.Load(e.image.ID); ok {
		m := *known.(*disk.MachineImage)
		return &m, nil
	}
	ctx = s.withNamespace(ctx)
	files, err := s.openDiskFiles(ctx, e.details)
	if err != nil {
		return nil, fmt.Errorf("image %s as a virtual machine: %w", e.image.ID, err)
	}
	defer files.Close()
	if err := files.Check(); err != nil {
		return nil, fmt.Errorf("image %s as a virtual machine: %w", e.image.ID, err)
	}
	m := files.MachineImage
	s.machines.Store(e.image.ID, &m)
	return &files.MachineImage, nil
}

// openDiskFiles opens an image's boot files without holding the image.
func (s *Store) openDiskFiles(ctx context.Context, d *details) (files *disk.Files, err error) {
	switch d.kind {
	case KindDisk:
		return s.openArtifact(ctx, d)
	case KindRootfs:
		err = s.withView(ctx, d.chainID(), func(_ context.Context, view *rootView) error {
			files, err = disk.Open(s.cfg.Root, view.mounts)
			return err
		})
		return files, err
	}
	return nil, failure.Invalidf("a %s has no disk", d.kind)
}

// openArtifact opens an artifact's disk, checks it against its digest, and reads its size.
func (s *Store) openArtifact(ctx context.Context, d *details) (*disk.Files, error) {
	disk, err := s.openPlainDisk(ctx, d)
	if err != nil {
		return nil, err
	}
	files, err := d.disk.Files(disk)
	if err != nil {
		disk.Close()
	}
	return files, err
}

// checkArtifact rejects an artifact that is truncated or does not match its media types, before the image is recorded.
// It decompresses a compressed disk.
func (s *Store) checkArtifact(ctx context.Context, d *details) error {
	switch d.kind {
	case KindComponent:
		return s.checkBinary(ctx, d)
	case KindDisk:
		files, err := s.openArtifact(ctx, d)
		if err != nil {
			return err
		}
		return errors.Join(files.Check(), files.Close())
	}
	return nil
}
