package image

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
)

// convertDisk converts a raw disk to another format with qemu-img (Debian package qemu-utils).
func convertDisk(t testing.TB, plain []byte, format string, options ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	check(t, os.WriteFile(from, append(plain, make([]byte, 1<<20-len(plain))...), 0o600))
	args := append([]string{"convert", "-f", "raw", "-O", format}, options...)
	if out, err := exec.CommandContext(t.Context(), "qemu-img", append(args, from, to)...).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img convert to %s: %v\n%s", format, err, out)
	}
	return []byte(read(t, to))
}

// TestV5OtherFormats: pulls, downloads and pushes reject a disk that is neither qcow2 nor raw, by its content and by
// its name. The error has the format's name and a remedy.
func TestV5OtherFormats(t *testing.T) {
	reg, files := newRegistry(t), newFiles(t)
	s := open(t, Config{Translation: rules(t, "translations: [{regexp: '^(.*)$', url: '"+files.URL+"/$1'}]")})
	boot := []byte("\xfa\x31\xc0 some code")
	for name, c := range map[string]struct {
		disk []byte
		says string
	}{
		"vmdk":      {convertDisk(t, boot, "vmdk"), "qemu-img convert -f vmdk"},
		"vmdk-flat": {[]byte("# Disk DescriptorFile\nversion=1\n"), "qemu-img convert -f vmdk"},
		"vdi":       {convertDisk(t, boot, "vdi"), "qemu-img convert -f vdi"},
		"vhdx":      {convertDisk(t, boot, "vhdx"), "qemu-img convert -f vhdx"},
		"vhd":       {convertDisk(t, boot, "vpc"), "qemu-img convert -f vpc"},
		"qed":       {convertDisk(t, boot, "qed"), "qemu-img convert -f qed"},
		"parallels": {convertDisk(t, boot, "parallels"), "qemu-img convert -f parallels"},
		"zip":       {append([]byte("PK\x03\x04"), make([]byte, 1000)...), "unpack it"},
		"tar":       {tarOf(t, file("disk.img", "x")), "unpack it"},
		"bzip2":     {[]byte("BZh91AY&SY"), "unpack it"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Pull(t.Context(), diskArtifact(disk.MediaTypeRaw, c.disk).push(t, reg, name), PullOptions{})
			wantError(t, err, errdefs.IsInvalidArgument, c.says)
			_, err = s.Pull(t.Context(), diskArtifact(disk.MediaTypeRaw+"+xz", compressXz(t, c.disk)).push(t, reg, name+"-xz"), PullOptions{})
			wantError(t, err, errdefs.IsInvalidArgument, c.says)
			img := pull(t, s, reg.push(t, name+"-container:1", imageOf(t, v1.Config{}, tarOf(t, file("disk/disk.img", string(c.disk))))))
			_, err = s.Machine(t.Context(), img.ID)
			wantError(t, err, errdefs.IsInvalidArgument, "/disk/disk.img", c.says)
			if name != "vmdk-flat" { // a text file is rejected for another reason
				files.put("/"+name+"-file", c.disk, "")
				_, err = s.Pull(t.Context(), "virtlet.cloud/"+name+"-file", PullOptions{})
				wantError(t, err, errdefs.IsInvalidArgument, c.says)
			}
			_, _, err = BuildDisk(saveFile(t, "disk.img", c.disk), nil)
			wantError(t, err, errdefs.IsInvalidArgument, c.says)
		})
	}
	for _, name := range []string{"disk.vmdk", "disk.VDI", "disk.vhdx", "disk.vhd", "disk.qed", "disk.ova", "disk.vmdk.xz"} {
		content := randomBytes(t, 2000)
		if strings.HasSuffix(name, ".xz") {
			content = compressXz(t, content)
		} else {
			img := pull(t, s, reg.push(t, strings.ToLower(name)+":1", imageOf(t, v1.Config{}, tarOf(t, file("disk/"+name, string(content))))))
			_, err := s.Machine(t.Context(), img.ID)
			wantError(t, err, errdefs.IsInvalidArgument, "by its name "+name)
		}
		files.put("/"+strings.ToLower(name), content, "")
		_, err := s.Pull(t.Context(), "virtlet.cloud/"+strings.ToLower(name), PullOptions{})
		wantError(t, err, errdefs.IsInvalidArgument, "by its name")
		_, err = disk.IsFile(saveFile(t, name, content))
		wantError(t, err, errdefs.IsInvalidArgument, "by its name")
	}
	sector := append([]byte("KDMV"), make([]byte, 508)...)
	sector[510], sector[511] = 0x55, 0xaa
	img := pull(t, s, diskArtifact(disk.MediaTypeRaw, sector).push(t, reg, "sector"))
	if m, err := s.Machine(t.Context(), img.ID); err != nil || m.Format != disk.FormatRaw {
		t.Errorf("Machine of a disk with a boot sector that begins like a VMDK = %+v, %v; want the format raw", m, err)
	}
}

// TestV5CutOffQcow2: pulls, downloads and pushes reject a qcow2 image with complete tables and truncated data.
func TestV5CutOffQcow2(t *testing.T) {
	reg, files := newRegistry(t), newFiles(t)
	s := open(t, Config{Translation: rules(t, "translations: [{regexp: '^(.*)$', url: '"+files.URL+"/$1'}]")})
	whole := convertDisk(t, randomBytes(t, 900<<10), disk.FormatQcow2)
	cut := whole[:len(whole)-200<<10]
	pull(t, s, diskArtifact(disk.MediaTypeQcow2, whole).push(t, reg, "whole"))
	_, err := s.Pull(t.Context(), diskArtifact(disk.MediaTypeQcow2, cut).push(t, reg, "cut"), PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "cut off")
	_, err = s.Pull(t.Context(), diskArtifact(disk.MediaTypeQcow2+"+xz", compressXz(t, cut)).push(t, reg, "cut-xz"), PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "cut off")
	img := pull(t, s, reg.push(t, "container:1", imageOf(t, v1.Config{}, tarOf(t, file("disk/disk.img", string(cut))))))
	_, err = s.Machine(t.Context(), img.ID)
	wantError(t, err, errdefs.IsInvalidArgument, "cut off")
	files.put("/cut", cut, "")
	_, err = s.Pull(t.Context(), "virtlet.cloud/cut", PullOptions{})
	wantError(t, err, errdefs.IsInvalidArgument, "cut off")
	_, _, err = BuildDisk(saveFile(t, "cut.qcow2", cut), nil)
	wantError(t, err, errdefs.IsInvalidArgument, "cut off")
}

// saveFile writes a file to a new directory.
func saveFile(t testing.TB, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	check(t, os.WriteFile(path, data, 0o600))
	return path
}
