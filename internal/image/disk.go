package image

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
	"github.com/tripod-run/tripod/internal/image/qcow2"
)

// DiskLayout is the arrangement of a virtual machine's boot files in an image.
type DiskLayout string

const (
	// LayoutContainerDisk is a container image with one file below /disk/ (KubeVirt's containerDisk).
	LayoutContainerDisk DiskLayout = "container-disk"
	// LayoutDiskArtifact is an OCI artifact whose one layer is a disk.
	LayoutDiskArtifact DiskLayout = "disk-artifact"
	// LayoutKernel is a container image with /boot/vmlinux and /boot/initrd, and perhaps a disk as in
	// LayoutContainerDisk.
	LayoutKernel DiskLayout = "kernel"
	// LayoutTranslated is a disk that was downloaded under a translated name.
	LayoutTranslated DiskLayout = "download"
)

// Formats of disks, as QEMU names them.
const (
	FormatQcow2 = "qcow2"
	FormatRaw   = "raw"
)

// Tripod's own media types.
const (
	// MediaTypeDiskQcow2 and MediaTypeDiskRaw are the types of disks; "+gzip", "+zstd" or "+xz" may follow.
	MediaTypeDiskQcow2 = "application/vnd.tripod.disk.qcow2"
	MediaTypeDiskRaw   = "application/vnd.tripod.disk.raw"
	// mediaTypeDownload is the type of the config in the manifests that this store makes for downloads.
	mediaTypeDownload = "application/vnd.tripod.disk.download.v1+json"
)

// diskFormats maps the media types of disk layers to formats. Types that are not Tripod's come from libmagic, LF
// Edge's edge-containers, and IANA's list.
var diskFormats = map[string]string{
	MediaTypeDiskQcow2:                           FormatQcow2,
	"application/vnd.qemu.qcow2":                 FormatQcow2,
	"application/x-qemu-disk":                    FormatQcow2,
	"application/x-qcow2":                        FormatQcow2,
	"application/vnd.lfedge.disk.layer.v1+qcow2": FormatQcow2,
	MediaTypeDiskRaw:                             FormatRaw,
	"application/x-raw-disk-image":               FormatRaw,
	"application/vnd.lfedge.disk.layer.v1+raw":   FormatRaw,
	"application/x-iso9660-image":                FormatRaw,
	"application/vnd.efi.iso":                    FormatRaw,
}

// diskLayer is the disk of an artifact according to its manifest.
type diskLayer struct {
	ocispec.Descriptor
	layout DiskLayout
	// format is never guessed from the disk's content (fault I5); compression is "", gzip, zstd or xz.
	format, compression string
}

// diskTypeOf splits a disk's media type into format and compression. ok is false if the type is not a disk's.
func diskTypeOf(mediaType string) (format, compression string, ok bool) {
	if format, ok = diskFormats[mediaType]; ok {
		return format, "", true
	}
	at := strings.LastIndexByte(mediaType, '+')
	if at < 0 || readers.Decompressor(mediaType[at+1:]) == nil {
		return "", "", false
	}
	format, ok = diskFormats[mediaType[:at]]
	return format, mediaType[at+1:], ok
}

func isDisk(mediaType string) bool {
	_, _, ok := diskTypeOf(mediaType)
	return ok
}

// diskOf returns the disk of an artifact. The disk must be the artifact's only layer.
func diskOf(m ocispec.Manifest) (*diskLayer, error) {
	if len(m.Layers) != 1 {
		return nil, failure.Invalidf("an artifact with a disk has %d layers; it must have one, the disk", len(m.Layers))
	}
	d := &diskLayer{Descriptor: strip(m.Layers[0]), layout: LayoutDiskArtifact}
	d.format, d.compression, _ = diskTypeOf(d.MediaType)
	if m.Config.MediaType == mediaTypeDownload {
		d.layout = LayoutTranslated
	}
	return d, nil
}

// downloadManifest returns the manifest of a downloaded disk. The manifest depends only on the file, not on where the
// file came from.
func downloadManifest(layer ocispec.Descriptor) (config Blob, manifest ocispec.Manifest) {
	config = NewBlob(mediaTypeDownload, []byte("{}"))
	return config, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		ArtifactType: mediaTypeDownload, Config: config.Descriptor, Layers: []ocispec.Descriptor{layer},
	}
}

// MachineImage describes the boot files of an image for virtual machines.
type MachineImage struct {
	Layout DiskLayout
	// Format is the disk's format, FormatQcow2 or FormatRaw; empty for a kernel without a disk.
	Format string
	// VirtualSize is the disk's size in bytes, a multiple of 512; 0 for a kernel without a disk.
	VirtualSize uint64
	// ISO9660 means that the disk is raw and contains an ISO 9660 file system, like a CD-ROM.
	ISO9660 bool
}

// Machine describes an image's boot files for virtual machines, judged by their content and never by a label.
//
// Errors: errdefs.ErrInvalidArgument with the reason if a machine cannot use the image, for example a qcow2 image that
// names another file (fault I5); ErrNotFound for an unknown image; ErrDataLoss for a damaged one.
func (s *Store) Machine(ctx context.Context, imageID string) (*MachineImage, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	e, err := s.index.find(imageID)
	if err != nil {
		return nil, err
	}
	if known, ok := s.machines.Load(e.image.ID); ok {
		m := *known.(*MachineImage)
		return &m, nil
	}
	ctx = s.withNamespace(ctx)
	files, err := s.openDiskFiles(ctx, e.details)
	if err != nil {
		return nil, fmt.Errorf("image %s as a virtual machine: %w", e.image.ID, err)
	}
	defer files.Close()
	if err := files.checkDisk(); err != nil {
		return nil, fmt.Errorf("image %s as a virtual machine: %w", e.image.ID, err)
	}
	m := files.MachineImage
	s.machines.Store(e.image.ID, &m)
	return &files.MachineImage, nil
}

// openDiskFiles opens an image's boot files without holding the image.
func (s *Store) openDiskFiles(ctx context.Context, d *details) (files *DiskFiles, err error) {
	switch d.kind {
	case KindDisk:
		return s.openArtifact(ctx, d)
	case KindRootfs:
		err = s.withView(ctx, d.chainID(), func(_ context.Context, view *rootView) error {
			files, err = s.openMachine(view.mounts)
			return err
		})
		return files, err
	}
	return nil, failure.Invalidf("a %s has no disk", d.kind)
}

// openArtifact opens an artifact's disk, checks it against its digest, and reads its size.
func (s *Store) openArtifact(ctx context.Context, d *details) (*DiskFiles, error) {
	disk, err := s.openPlainDisk(ctx, d)
	if err != nil {
		return nil, err
	}
	files := &DiskFiles{MachineImage: MachineImage{Layout: d.disk.layout}}
	if err := files.setDisk(disk, disk.Name(), d.disk.format); err != nil {
		disk.Close()
		return nil, fmt.Errorf("layer %s of the type %s: %w", d.disk.Digest, d.disk.MediaType, err)
	}
	return files, nil
}

// setDisk sets the disk and reads its size. A qcow2 image must be valid and name no other file. A raw disk must not
// look like a disk of another format.
func (f *DiskFiles) setDisk(disk *os.File, path, format string) error {
	info, err := disk.Stat()
	if err != nil {
		return err
	}
	size := uint64(info.Size())
	if format == FormatQcow2 {
		q, err := qcow2.Inspect(disk, info.Size())
		if err != nil {
			return err
		}
		size = q.VirtualSize
	} else {
		head := make([]byte, min(info.Size(), foreignHead))
		if _, err := disk.ReadAt(head, 0); err != nil {
			return err
		}
		if err := refuseForeign(path, head); err != nil {
			return err
		}
		if f.ISO9660, err = isISO9660(disk); err != nil {
			return err
		}
	}
	if size == 0 {
		return failure.Invalidf("the disk is empty")
	}
	f.Disk, f.DiskPath, f.Format = disk, path, format
	f.VirtualSize = (size + 511) &^ 511 // QEMU rounds up, too
	return nil
}

// checkDisk rejects a truncated qcow2 image. It reads all tables, so call it once per image, not at every open.
func (f *DiskFiles) checkDisk() error {
	if f.Format != FormatQcow2 {
		return nil
	}
	info, err := f.Disk.Stat()
	if err != nil {
		return err
	}
	_, err = qcow2.Check(f.Disk, info.Size())
	return err
}

// formatByContent determines a file's format from its name or its first bytes, if there is no media type. It is used
// only for files that no guest has written to, because a guest must not choose its disk's format (fault I5).
func formatByContent(r io.ReaderAt, name string) string {
	switch {
	case strings.HasSuffix(name, ".raw"):
		return FormatRaw
	case strings.HasSuffix(name, ".qcow2"):
		return FormatQcow2
	}
	head := make([]byte, len(qcow2.Magic))
	if _, err := r.ReadAt(head, 0); err == nil && qcow2.Is(head) {
		return FormatQcow2
	}
	return FormatRaw
}

// sniffDisk determines the media type of a disk from its file name (.raw, .qcow2) or its first bytes. It also returns
// these bytes, decompressed. It is called once per disk, before any machine uses the disk; the manifest records the
// media type for later uses.
func sniffDisk(r io.Reader, name string) (mediaType string, head []byte, err error) {
	b := bufio.NewReaderSize(r, 4096)
	if head, err = b.Peek(512); err != nil && err != io.EOF {
		return "", nil, err
	}
	if err := refuseForeign(name, nil); err != nil {
		return "", nil, err
	}
	compression := ""
	if !strings.HasSuffix(name, ".raw") && !strings.HasSuffix(name, ".qcow2") {
		compression = readers.CompressionOf(head)
	}
	if compression != "" {
		name = strings.TrimSuffix(name, path.Ext(name))
		if head, err = plainHead(compression, b); err != nil {
			return "", nil, err
		}
	}
	format := formatByContent(bytes.NewReader(head), name)
	if format == FormatRaw {
		if err := refuseForeign(name, head); err != nil {
			return "", nil, err
		}
	}
	return diskMediaType(format, compression), head, nil
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
		return errors.Join(files.checkDisk(), files.Close())
	}
	return nil
}
