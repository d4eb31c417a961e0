package disk

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
)

// Layout is the arrangement of a virtual machine's boot files in an image.
type Layout string

const (
	// LayoutContainerDisk is a container image with one file below /disk/ (KubeVirt's containerDisk).
	LayoutContainerDisk Layout = "container-disk"
	// LayoutDiskArtifact is an OCI artifact whose one layer is a disk.
	LayoutDiskArtifact Layout = "disk-artifact"
	// LayoutKernel is a container image with /boot/vmlinux and /boot/initrd, and perhaps a disk as in
	// LayoutContainerDisk.
	LayoutKernel Layout = "kernel"
	// LayoutTranslated is a disk that was downloaded under a translated name.
	LayoutTranslated Layout = "download"
)

// Formats of disks, as QEMU names them.
const (
	FormatQcow2 = "qcow2"
	FormatRaw   = "raw"
)

// Tripod's own media types.
const (
	// MediaTypeQcow2 and MediaTypeRaw are the types of disks; "+gzip", "+zstd" or "+xz" may follow.
	MediaTypeQcow2 = "application/vnd.tripod.disk.qcow2"
	MediaTypeRaw   = "application/vnd.tripod.disk.raw"
	// MediaTypeDownload is the type of the config in the manifests that the image store makes for downloads.
	MediaTypeDownload = "application/vnd.tripod.disk.download.v1+json"
)

// formats maps the media types of disk layers to formats. Types that are not Tripod's come from libmagic, LF
// Edge's edge-containers, and IANA's list.
var formats = map[string]string{
	MediaTypeQcow2:                               FormatQcow2,
	"application/vnd.qemu.qcow2":                 FormatQcow2,
	"application/x-qemu-disk":                    FormatQcow2,
	"application/x-qcow2":                        FormatQcow2,
	"application/vnd.lfedge.disk.layer.v1+qcow2": FormatQcow2,
	MediaTypeRaw:                                 FormatRaw,
	"application/x-raw-disk-image":               FormatRaw,
	"application/vnd.lfedge.disk.layer.v1+raw":   FormatRaw,
	"application/x-iso9660-image":                FormatRaw,
	"application/vnd.efi.iso":                    FormatRaw,
}

// Layer is the disk of an artifact according to its manifest.
type Layer struct {
	ocispec.Descriptor
	layout Layout
	// Format is never guessed from the disk's content (fault I5); Compression is "", gzip, zstd or xz.
	Format, Compression string
}

// FormatOf returns the format of disks with a media type without compression; "" if the type is not a disk's.
func FormatOf(mediaType string) string { return formats[mediaType] }

// typeOf splits a disk's media type into format and compression. ok is false if the type is not a disk's.
func typeOf(mediaType string) (format, compression string, ok bool) {
	if format = FormatOf(mediaType); format != "" {
		return format, "", true
	}
	at := strings.LastIndexByte(mediaType, '+')
	if at < 0 || readers.Decompressor(mediaType[at+1:]) == nil {
		return "", "", false
	}
	format = FormatOf(mediaType[:at])
	return format, mediaType[at+1:], format != ""
}

// Is reports whether a media type is that of a disk.
func Is(mediaType string) bool {
	_, _, ok := typeOf(mediaType)
	return ok
}

// MediaType returns Tripod's media type of disks in a format with a compression, "" for none.
func MediaType(format, compression string) string {
	mediaType := MediaTypeRaw
	if format == FormatQcow2 {
		mediaType = MediaTypeQcow2
	}
	if compression != "" {
		mediaType += "+" + compression
	}
	return mediaType
}

// LayerOf returns the disk of an artifact, given the type of its config. The disk must be the artifact's only layer.
func LayerOf(config string, layers []ocispec.Descriptor) (*Layer, error) {
	if len(layers) != 1 {
		return nil, failure.Invalidf("an artifact with a disk has %d layers; it must have one, the disk", len(layers))
	}
	d := &Layer{Descriptor: layers[0], layout: LayoutDiskArtifact}
	d.Format, d.Compression, _ = typeOf(d.MediaType)
	if config == MediaTypeDownload {
		d.layout = LayoutTranslated
	}
	return d, nil
}

// MachineImage describes the boot files of an image for virtual machines.
type MachineImage struct {
	Layout Layout
	// Format is the disk's format, FormatQcow2 or FormatRaw; empty for a kernel without a disk.
	Format string
	// VirtualSize is the disk's size in bytes, a multiple of 512; 0 for a kernel without a disk.
	VirtualSize uint64
	// ISO9660 means that the disk is raw and contains an ISO 9660 file system, like a CD-ROM.
	ISO9660 bool
}

// Files returns the boot files of an artifact, whose plain disk is open. It reads the disk's size.
func (d *Layer) Files(disk *os.File) (*Files, error) {
	files := &Files{MachineImage: MachineImage{Layout: d.layout}}
	if err := files.setDisk(disk, disk.Name(), d.Format); err != nil {
		return nil, fmt.Errorf("layer %s of the type %s: %w", d.Digest, d.MediaType, err)
	}
	return files, nil
}

// setDisk sets the disk and reads its size. A qcow2 image must be valid and name no other file. A raw disk must not
// look like a disk of another format.
func (f *Files) setDisk(disk *os.File, path, format string) error {
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

// Check rejects a truncated qcow2 image. It reads all tables, so call it once per image, not at every open.
func (f *Files) Check() error {
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

// Sniff determines the media type of a disk from its file name (.raw, .qcow2) or its first bytes. It also returns
// these bytes, decompressed. It is called once per disk, before any machine uses the disk; the manifest records the
// media type for later uses.
func Sniff(r io.Reader, name string) (mediaType string, head []byte, err error) {
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
	return MediaType(format, compression), head, nil
}
