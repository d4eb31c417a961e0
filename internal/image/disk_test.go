package image

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
)

// qcow2Of returns an empty qcow2 image of a virtual size.
func qcow2Of(t testing.TB, size uint64) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	check(t, qcow2.CreateOverlay(t.Context(), path, size, qcow2.Overlay{ClusterBits: 12}))
	return []byte(read(t, path))
}

// qcow2WithBackingFile returns a qcow2 image that names a backing file (fault I5).
func qcow2WithBackingFile(t testing.TB) []byte {
	image := qcow2Of(t, 1<<20)
	binary.BigEndian.PutUint64(image[8:], 200)
	binary.BigEndian.PutUint32(image[16:], uint32(copy(image[200:], "/etc/shadow")))
	return image
}

// qcow2WithDataFile returns a qcow2 image that keeps its data in another file.
func qcow2WithDataFile(t testing.TB) []byte {
	image := qcow2Of(t, 1<<20)
	binary.BigEndian.PutUint64(image[72:], 4)
	return image
}

func compressZstd(t testing.TB, plain []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	check(t, err)
	defer w.Close()
	return w.EncodeAll(plain, nil)
}

// compressXz compresses with xz (Debian package xz-utils).
func compressXz(t testing.TB, plain []byte, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "xz", append([]string{"-c"}, args...)...)
	cmd.Stdin = bytes.NewReader(plain)
	out, err := cmd.Output()
	check(t, err)
	return out
}

func diskArtifact(mediaType string, disk []byte) *rawImage {
	return artifactOf(ocispec.MediaTypeEmptyJSON, mediaType, disk)
}

// openAndRead opens a disk, checks that its paths refer to the same files, and returns its content.
func openAndRead(t testing.TB, s *Store, key, imageID string) (*disk.Files, string) {
	t.Helper()
	f, err := s.OpenDisk(t.Context(), key, imageID)
	check(t, err)
	t.Cleanup(func() { f.Close() })
	text := ""
	for _, part := range []struct {
		file *os.File
		path string
	}{{f.Disk, f.DiskPath}, {f.Kernel, f.KernelPath}, {f.Initrd, f.InitrdPath}} {
		if part.file == nil {
			continue
		}
		data, err := io.ReadAll(part.file)
		check(t, err)
		if read(t, part.path) != string(data) {
			t.Errorf("%s: the content differs from the open file's", part.path)
		}
		if _, err := part.file.Write([]byte("x")); err == nil {
			t.Errorf("%s: a write succeeded, want a read-only file", part.path)
		}
		text += string(data)
	}
	return f, text
}

func TestDiskArtifacts(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	q := qcow2Of(t, 3<<20)
	raw := bytes.Repeat([]byte("raw disk"), 1000)
	for name, c := range map[string]struct {
		mediaType string
		layer     []byte
		plain     []byte
		want      disk.MachineImage
	}{
		"qcow2": {disk.MediaTypeQcow2, q, q, disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: disk.FormatQcow2, VirtualSize: 3 << 20}},
		"magic": {"application/x-qemu-disk", q, q,
			disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: disk.FormatQcow2, VirtualSize: 3 << 20}},
		"gzip": {"application/x-qemu-disk+gzip", compressGzip(t, q), q,
			disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: disk.FormatQcow2, VirtualSize: 3 << 20}},
		"zstd": {disk.MediaTypeQcow2 + "+zstd", compressZstd(t, q), q,
			disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: disk.FormatQcow2, VirtualSize: 3 << 20}},
		"xz": {disk.MediaTypeRaw + "+xz", compressXz(t, raw), raw,
			disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: disk.FormatRaw, VirtualSize: 8192}},
		"lfedge": {"application/vnd.lfedge.disk.layer.v1+raw", raw, raw,
			disk.MachineImage{Layout: disk.LayoutDiskArtifact, Format: disk.FormatRaw, VirtualSize: 8192}},
	} {
		t.Run(name, func(t *testing.T) {
			img := pull(t, s, diskArtifact(c.mediaType, c.layer).push(t, reg, name))
			m, err := s.Machine(t.Context(), img.ID)
			check(t, err)
			f, text := openAndRead(t, s, name, img.ID)
			if img.Kind != KindDisk || *m != c.want || f.MachineImage != c.want || text != string(c.plain) || f.Kernel != nil {
				t.Errorf("got kind %s, Machine %+v, OpenDisk %+v and %d bytes; want a disk with %+v and %d bytes", img.Kind, m, f, len(text), c.want,
					len(c.plain))
			}
			check(t, s.CloseDisk(t.Context(), name))
		})
	}
	all, err := s.List(t.Context())
	check(t, err)
	for _, img := range all {
		check(t, s.Remove(t.Context(), img.ID))
	}
	wantEmpty(t, s)
}

func TestBadDiskArtifacts(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{Limits: Limits{UnpackedBytes: 1 << 20}})
	q := qcow2Of(t, 1<<20)
	for name, c := range map[string]struct {
		artifact *rawImage
		words    []string
	}{
		"i5-backing":    {diskArtifact(disk.MediaTypeQcow2, qcow2WithBackingFile(t)), []string{"backing file"}},
		"i5-data-file":  {diskArtifact(disk.MediaTypeQcow2, qcow2WithDataFile(t)), []string{"external data file"}},
		"i5-compressed": {diskArtifact(disk.MediaTypeQcow2+"+gzip", compressGzip(t, qcow2WithBackingFile(t))), []string{"backing file"}},
		"not-qcow2":     {diskArtifact(disk.MediaTypeQcow2, []byte("#!/bin/sh")), []string{"magic", "#!/bin/s"}},
		"cut-off":       {diskArtifact(disk.MediaTypeQcow2, q[:len(q)/2]), []string{"cut off"}},
		"two-disks": {artifactOf(ocispec.MediaTypeEmptyJSON, disk.MediaTypeRaw, []byte("a"), disk.MediaTypeRaw, []byte("b")),
			[]string{"2 layers"}},
		"bad-gzip": {diskArtifact(disk.MediaTypeRaw+"+gzip", []byte("plain")), []string{"gzip"}},
		"cut-zstd": {diskArtifact(disk.MediaTypeRaw+"+zstd", compressZstd(t, q)[:20]), []string{"zstd"}},
		"cut-xz":   {diskArtifact(disk.MediaTypeRaw+"+xz", compressXz(t, q)[:40]), []string{"xz"}},
		"bomb": {diskArtifact(disk.MediaTypeRaw+"+gzip", compressGzip(t, make([]byte, 2<<20))),
			[]string{"bytes unpacked", "1048576"}},
		"large-dictionary": {diskArtifact(disk.MediaTypeRaw+"+xz", compressXz(t, q, "--lzma2=preset=0,dict=1GiB")), []string{"dictionary"}},
		"empty":            {diskArtifact(disk.MediaTypeRaw+"+xz", compressXz(t, nil)), []string{"empty"}},
		"unknown":          {diskArtifact(disk.MediaTypeRaw+"+lz4", q), []string{"lz4"}},
	} {
		_, err := s.Pull(t.Context(), c.artifact.push(t, reg, name), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, c.words...)
	}
	if all, _ := s.List(t.Context()); len(all) > 0 {
		t.Errorf("List after invalid artifacts = %+v, want no images", all)
	}
	wantEmpty(t, s)
}

// TestISO9660: an ISO 9660 file is recognized by its content, also if it has a boot sector, and whatever its media type
// and its name say.
func TestISO9660(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	iso, plain := make([]byte, 64<<10), make([]byte, 64<<10)
	copy(iso[32<<10:], "\x01CD001\x01")
	hybrid := slices.Clone(iso)
	hybrid[510], hybrid[511] = 0x55, 0xaa
	for name, c := range map[string]struct {
		artifact string // media type; "" for a container image
		file     string
		disk     []byte
		want     bool
	}{
		"raw":              {disk.MediaTypeRaw, "", iso, true},
		"hybrid":           {disk.MediaTypeRaw, "", hybrid, true},
		"libmagic":         {"application/x-iso9660-image", "", iso, true},
		"iana":             {"application/vnd.efi.iso+xz", "", compressXz(t, iso), true},
		"container":        {"", "boot.iso", iso, true},
		"unnamed":          {"", "boot", iso, true},
		"not-iso":          {"application/x-iso9660-image", "", plain, false},
		"short":            {disk.MediaTypeRaw, "", iso[:32<<10+3], false},
		"misnamed":         {"", "boot.iso", plain, false},
		"qcow2-around-iso": {disk.MediaTypeQcow2, "", convertDisk(t, iso, disk.FormatQcow2), false},
	} {
		var ref string
		if c.artifact == "" {
			ref = reg.push(t, name+":1", imageOf(t, v1.Config{}, tarOf(t, file("disk/"+c.file, string(c.disk)))))
		} else {
			ref = diskArtifact(c.artifact, c.disk).push(t, reg, name)
		}
		img := pull(t, s, ref)
		if m, err := s.Machine(t.Context(), img.ID); err != nil || m.ISO9660 != c.want {
			t.Errorf("%s: Machine = %+v, %v; want ISO9660 = %t", name, m, err, c.want)
		}
	}
}

// TestI5RawStaysRaw: a raw disk stays raw, whatever its content.
func TestI5RawStaysRaw(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	hostile := qcow2WithBackingFile(t)
	img := pull(t, s, diskArtifact(disk.MediaTypeRaw, hostile).push(t, reg, "raw"))
	f, text := openAndRead(t, s, "c", img.ID)
	if f.Format != disk.FormatRaw || f.VirtualSize != uint64(len(hostile)+511)&^511 || text != string(hostile) {
		t.Errorf("disk with a qcow2 header: got %+v, want the format raw", f)
	}
	named := pull(t, s, reg.push(t, "named:1", imageOf(t, v1.Config{}, tarOf(t, file("disk/root.raw", string(hostile))))))
	if m, err := s.Machine(t.Context(), named.ID); err != nil || m.Format != disk.FormatRaw {
		t.Errorf("Machine of the named disk = %+v, %v; want the format raw", m, err)
	}
}

func TestContainerDisks(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	q, q2 := string(qcow2Of(t, 5<<20)), string(qcow2Of(t, 7<<20))
	whiteout := file("disk/.wh.old.img", "")
	kernel := []entryOf{file("boot/vmlinux-6.1", "kernel"), link("boot/vmlinux", "/boot/vmlinux-6.1"), file("boot/initrd", "initrd"),
		file("boot/cmdline", " console=ttyS0 quiet\n")}
	for name, c := range map[string]struct {
		layers [][]byte
		want   disk.MachineImage
		text   string
		line   string
	}{
		"one layer": {[][]byte{tarOf(t, file("disk/disk.img", q))},
			disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q, ""},
		"raw": {[][]byte{tarOf(t, file("disk/disk.img", strings.Repeat("x", 1024)))},
			disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: disk.FormatRaw, VirtualSize: 1024}, strings.Repeat("x", 1024), ""},
		"replaced": {[][]byte{tarOf(t, file("disk/disk.img", q)), tarOf(t, file("disk/disk.img", q2)), tarOf(t, file("etc/x", "y"))},
			disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: disk.FormatQcow2, VirtualSize: 7 << 20}, q2, ""},
		"whiteout": {[][]byte{tarOf(t, file("disk/old.img", q2)), tarOf(t, whiteout, file("disk/disk.img", q))},
			disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q, ""},
		"linked": {[][]byte{tarOf(t, file("images/a", q), link("disk", "../../images")), tarOf(t, file("b", ""))},
			disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q, ""},
		"linked file": {[][]byte{tarOf(t, file("images/a", q), dirEntry("disk"), link("disk/root", "/images/a"))},
			disk.MachineImage{Layout: disk.LayoutContainerDisk, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q, ""},
		"kernel": {[][]byte{tarOf(t, kernel...)}, disk.MachineImage{Layout: disk.LayoutKernel, Format: "", VirtualSize: 0}, "kernelinitrd",
			"console=ttyS0 quiet"},
		"kernel disk": {[][]byte{tarOf(t, kernel...), tarOf(t, file("disk/a.qcow2", q))},
			disk.MachineImage{Layout: disk.LayoutKernel, Format: disk.FormatQcow2, VirtualSize: 5 << 20}, q + "kernelinitrd", "console=ttyS0 quiet"},
	} {
		t.Run(name, func(t *testing.T) {
			repo := strings.ReplaceAll(name, " ", "-")
			img := pull(t, s, reg.push(t, repo+":1", imageOf(t, v1.Config{}, c.layers...)))
			m, err := s.Machine(t.Context(), img.ID)
			check(t, err)
			f, text := openAndRead(t, s, repo, img.ID)
			if *m != c.want || f.MachineImage != c.want || text != c.text || f.Cmdline != c.line {
				t.Errorf("got Machine %+v, OpenDisk %+v and %d bytes; want %+v and %d bytes", m, f, len(text), c.want, len(c.text))
			}
			check(t, s.CloseDisk(t.Context(), repo))
		})
	}
}

func TestBadContainerDisks(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	fifo := entryOf{Header: tar.Header{Name: "disk/disk.img", Typeflag: tar.TypeFifo, Mode: 0o644}}
	long := strings.Repeat("x", 2048+1)
	for name, c := range map[string]struct {
		entries []entryOf
		words   []string
	}{
		"nothing":      {[]entryOf{file("etc/text", "x")}, []string{"neither", "/disk/", "boot/vmlinux"}},
		"empty":        {[]entryOf{dirEntry("disk")}, []string{"neither"}},
		"two":          {[]entryOf{file("disk/a", "x"), file("disk/b", "x")}, []string{"more than one"}},
		"many":         {manyFiles("disk/%d", 200), []string{"more than one"}},
		"fifo":         {[]entryOf{fifo}, []string{"not a regular file"}},
		"directory":    {[]entryOf{dirEntry("boot/vmlinux"), file("boot/initrd", "x")}, []string{"/boot/vmlinux", "not a regular file"}},
		"dangling":     {[]entryOf{dirEntry("disk"), link("disk/a", "/nowhere")}, []string{"symbolic link"}},
		"out":          {[]entryOf{dirEntry("disk"), link("disk/a", "../../../../etc/hostname")}, []string{"symbolic link"}},
		"loop":         {[]entryOf{dirEntry("disk"), link("disk/a", "a")}, []string{"/disk/a"}},
		"no initrd":    {[]entryOf{file("boot/vmlinux", "x"), file("disk/a", "x")}, []string{"only one"}},
		"backing":      {[]entryOf{file("disk/disk.img", string(qcow2WithBackingFile(t)))}, []string{"backing file", "disk.img"}},
		"data file":    {[]entryOf{file("disk/disk.img", string(qcow2WithDataFile(t)))}, []string{"external data file"}},
		"not qcow2":    {[]entryOf{file("disk/disk.qcow2", "text")}, []string{"magic"}},
		"empty disk":   {[]entryOf{file("disk/disk.img", "")}, []string{"empty"}},
		"long cmdline": {[]entryOf{file("boot/vmlinux", "x"), file("boot/initrd", "x"), file("boot/cmdline", long)}, []string{"cmdline"}},
		"two lines":    {[]entryOf{file("boot/vmlinux", "x"), file("boot/initrd", "x"), file("boot/cmdline", "a\nb")}, []string{"cmdline"}},
	} {
		t.Run(name, func(t *testing.T) {
			repo := strings.ReplaceAll(name, " ", "-")
			img := pull(t, s, reg.push(t, repo+":1", imageOf(t, v1.Config{}, tarOf(t, c.entries...), tarOf(t, file("x", "y")))))
			_, err := s.Machine(t.Context(), img.ID)
			wantError(t, err, errdefs.IsInvalidArgument, append(c.words, img.ID)...)
			_, err = s.OpenDisk(t.Context(), "c", img.ID)
			wantError(t, err, errdefs.IsInvalidArgument, c.words...)
			if keys, err := s.Disks(t.Context()); err != nil || len(keys) > 0 {
				t.Errorf("Disks() after a rejected image = %q, %v; want none", keys, err)
			}
		})
	}
	wasm := pull(t, s, artifactOf(MediaTypeWasmConfig, MediaTypeWasm, wasmOf("x")).push(t, reg, "wasm"))
	_, err := s.Machine(t.Context(), wasm.ID)
	wantError(t, err, errdefs.IsInvalidArgument, "component", "no disk")
	_, err = s.OpenDisk(t.Context(), "c", wasm.ID)
	wantError(t, err, errdefs.IsInvalidArgument, "no disk")
	_, err = s.Machine(t.Context(), "unknown")
	wantError(t, err, errdefs.IsNotFound)
	_, err = s.OpenDisk(t.Context(), "c", "unknown")
	wantError(t, err, errdefs.IsNotFound)
	_, err = s.OpenDisk(t.Context(), "disk-x", wasm.ID)
	wantError(t, err, errdefs.IsInvalidArgument)
}

func manyFiles(format string, n int) (entries []entryOf) {
	for i := range n {
		entries = append(entries, file(fmt.Sprintf(format, i), "x"))
	}
	return entries
}

// TestOpenDiskHolds: a machine's image survives removal, collection and restarts until CloseDisk.
func TestOpenDiskHolds(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	q := qcow2Of(t, 5<<20)
	disk := pull(t, s, diskArtifact(disk.MediaTypeQcow2+"+gzip", compressGzip(t, q)).push(t, reg, "disk"))
	rootfs := pull(t, s, reg.push(t, "rootfs:1", imageOf(t, v1.Config{}, tarOf(t, file("disk/a", string(q))), tarOf(t, file("b", "")))))
	for key, img := range map[string]Image{"artifact": disk, "container": rootfs} {
		openAndRead(t, s, key, img.ID)
		first, _ := openAndRead(t, s, key, img.RepoTags[0])
		second, _ := openAndRead(t, s, key, img.ID)
		if first.DiskPath != second.DiskPath || first.Disk.Fd() == second.Disk.Fd() {
			t.Errorf("%s: OpenDisk again: got %+v, want the path of %+v and a new file descriptor", key, second, first)
		}
	}
	_, err := s.OpenDisk(t.Context(), "artifact", rootfs.ID)
	wantError(t, err, errdefs.IsAlreadyExists, disk.ID)
	_, err = s.OpenDisk(t.Context(), "container", disk.ID)
	wantError(t, err, errdefs.IsAlreadyExists, rootfs.ID)
	if keys, err := s.Snapshots(t.Context()); err != nil || len(keys) > 0 {
		t.Errorf("Snapshots() = %q, %v; want no disks in it", keys, err)
	}
	for _, img := range []Image{disk, rootfs} {
		check(t, s.Remove(t.Context(), img.ID))
	}
	for range 2 {
		check(t, s.Collect(t.Context()))
		for key, img := range map[string]Image{"artifact": disk, "container": rootfs} {
			if f, text := openAndRead(t, s, key, img.ID); text != string(q) || f.VirtualSize != 5<<20 {
				t.Errorf("%s: OpenDisk of a removed image: got %+v, want the same disk", key, f)
			}
		}
		keys, err := s.Disks(t.Context())
		check(t, err)
		slices.Sort(keys)
		if !slices.Equal(keys, []string{"artifact", "container"}) {
			t.Errorf("Disks() = %q, want artifact and container", keys)
		}
		root := s.cfg.Root
		check(t, s.Close())
		s = open(t, Config{Root: root})
	}
	_, err = s.OpenDisk(t.Context(), "artifact", rootfs.ID)
	wantError(t, err, errdefs.IsAlreadyExists)
	for _, key := range []string{"artifact", "container", "container", "never"} {
		check(t, s.CloseDisk(t.Context(), key))
	}
	_, err = s.OpenDisk(t.Context(), "artifact", disk.ID)
	wantError(t, err, errdefs.IsNotFound)
	wantEmpty(t, s)
}

// TestV4DamagedDisks: OpenDisk never returns a damaged disk, and rebuilds it where it can.
func TestV4DamagedDisks(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	q := qcow2Of(t, 5<<20)
	damage := func(dgst digest.Digest, data []byte) {
		t.Helper()
		check(t, os.Chmod(blobPath(s, dgst), 0o600))
		check(t, os.WriteFile(blobPath(s, dgst), data, 0o600))
	}
	packed := pull(t, s, diskArtifact(disk.MediaTypeQcow2+"+gzip", compressGzip(t, q)).push(t, reg, "packed"))
	damage(digest.FromBytes(q), nil)
	if _, text := openAndRead(t, s, "packed", packed.ID); text != string(q) {
		t.Error("OpenDisk did not rebuild the damaged unpacked disk")
	}
	ref := diskArtifact(disk.MediaTypeQcow2, q).push(t, reg, "plain")
	plain := pull(t, s, ref)
	openAndRead(t, s, "plain", plain.ID)
	evil := bytes.Clone(q)
	evil[len(evil)-1] ^= 1
	damage(plain.Layers[0].Digest, evil)
	_, err := s.OpenDisk(t.Context(), "plain", plain.ID)
	wantError(t, err, errdefs.IsDataLoss, plain.Layers[0].Digest.String())
	if _, err := s.Get(t.Context(), ref); !errdefs.IsNotFound(err) {
		t.Errorf("Get of the damaged image: got error %v, want not found", err)
	}
	check(t, s.CloseDisk(t.Context(), "plain"))
	if _, text := openAndRead(t, s, "plain", pull(t, s, ref).ID); text != string(q) {
		t.Error("the disk is still damaged after another pull")
	}
}

// TestV4KilledWhileUnpacking: a daemon that dies while it writes a disk leaves no usable incomplete disk.
func TestV4KilledWhileUnpacking(t *testing.T) {
	failpoint.Needed(t)
	reg, root := newRegistry(t), filepath.Join(t.TempDir(), "image")
	q := qcow2Of(t, 5<<20)
	ref := diskArtifact(disk.MediaTypeQcow2+"+zstd", compressZstd(t, q)).push(t, reg, "disk")
	for _, point := range []string{"image.disk.unpack", "image.pull.record"} {
		if err := helper(t, root, "pull "+ref, point+"=kill").Run(); err == nil {
			t.Fatalf("%s: the process was not killed", point)
		}
		s := open(t, Config{Root: root})
		if _, err := s.Get(t.Context(), ref); !errdefs.IsNotFound(err) {
			t.Errorf("%s: Get of the incomplete image: got error %v, want not found", point, err)
		}
		check(t, s.Close())
	}
	s := open(t, Config{Root: root})
	img := pull(t, s, ref)
	if _, text := openAndRead(t, s, "c", img.ID); text != string(q) {
		t.Error("the disk's content differs from the original")
	}
	// In the same process, unpacking starts over after a failure.
	other := diskArtifact(disk.MediaTypeQcow2+"+gzip", compressGzip(t, qcow2Of(t, 9<<20))).push(t, reg, "other")
	check(t, failpoint.Arm("image.disk.unpack", "1*error(no)"))
	_, err := s.Pull(t.Context(), other, PullOptions{})
	check(t, failpoint.Arm("image.disk.unpack", ""))
	if err == nil {
		t.Error("unpacking a damaged disk succeeded, want an error")
	}
	pull(t, s, other)
	check(t, s.CloseDisk(t.Context(), "c"))
	for _, ref := range []string{ref, other} {
		check(t, s.Remove(t.Context(), ref))
	}
	wantEmpty(t, s)
}
