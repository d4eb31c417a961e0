package main

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// packages are the Debian packages that provide the content of the images and of the guest of OCI pods. They are downloaded and
// read, not installed, so the host's own packages do not matter.
var packages = []string{
	"busybox", "busybox-static", "nginx", "libc6", "libcrypt1", "libpcre2-8-0", "libssl3", "zlib1g",
	"syslinux", "syslinux-common", "mtools", "dosfstools", // for the bootable disk
	// for Kubernetes' tests; curl needs many libraries
	"bash", "libtinfo6", "hostname", "netcat-openbsd", "libbsd0", "libmd0",
	"curl", "libcurl4", "libbrotli1", "libcom-err2", "libffi8", "libgmp10", "libgnutls30", "libgssapi-krb5-2", "libhogweed6", "libidn2-0",
	"libk5crypto3", "libkeyutils1", "libkrb5-3", "libkrb5support0", "libldap-2.5-0", "libnettle8", "libnghttp2-14", "libp11-kit0", "libpsl5",
	"librtmp1", "libsasl2-2", "libssh2-1", "libtasn1-6", "libunistring2", "libzstd1",
	// for the guest of OCI pods
	"crun", "conmon", "catatonit", "libcap2", "libseccomp2", "libsystemd0", "libyajl2", "libgcrypt20", "libgpg-error0", "liblz4-1",
	"liblzma5", "libglib2.0-0",
}

// download lists the files to download: the packages and the current kernels.
type download struct {
	packages    []string
	cloud, full string
	// files are the names of the packages' files, sorted.
	files []string
}

// find asks apt for the names of the files to download. It returns false if apt does not know all packages.
func (d *download) find(ctx context.Context) bool {
	kernels := kernelPackages(ctx, cloudKernel, fullKernel)
	d.cloud, d.full = kernels[cloudKernel], kernels[fullKernel]
	if d.cloud == "" || d.full == "" {
		return false
	}
	d.packages = append(slices.Clone(packages), d.cloud, d.full)
	d.files = nil
	out, _ := exec.CommandContext(ctx, "apt-get", append([]string{"download", "--print-uris", "-qq"}, d.packages...)...).Output()
	for _, m := range uriLine.FindAllStringSubmatch(string(out), -1) {
		d.files = append(d.files, m[1])
	}
	slices.Sort(d.files)
	return len(d.files) == len(d.packages)
}

// uriLine matches a line of `apt-get download --print-uris`: 'URI' FILE SIZE HASH. FILE includes the version.
var uriLine = regexp.MustCompile(`(?m)^'[^']+' (\S+\.deb) `)

// findDebs asks apt for the current versions of the packages. If packages are missing from apt's lists, findDebs
// updates the lists.
func findDebs(ctx context.Context) (*download, error) {
	d := &download{}
	if d.find(ctx) {
		return d, nil
	}
	if err := apt(ctx, "", "update"); err != nil {
		return nil, err
	}
	if !d.find(ctx) {
		return nil, fmt.Errorf("apt-get knows only %v of the packages %v and of the dependencies of %s and %s", d.files, packages, cloudKernel,
			fullKernel)
	}
	return d, nil
}

// apt runs apt-get in dir. apt-get stays root; otherwise it would switch to a user who cannot write to dir.
func apt(ctx context.Context, dir string, args ...string) error {
	c := exec.CommandContext(ctx, "apt-get", append([]string{"-qq", "-o", "APT::Sandbox::User=root"}, args...)...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, out)
	}
	return nil
}

// debian is the content of the packages. The keys are paths without a leading slash.
type debian map[string]*entry

// fetch downloads the packages that are missing in dir, and deletes other versions of the packages from dir.
func (d *download) fetch(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	have, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	old := func(e os.DirEntry) bool { return !slices.Contains(d.files, e.Name()) }
	for _, e := range have {
		if old(e) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if len(slices.DeleteFunc(have, old)) == len(d.files) {
		return nil
	}
	get := append([]string{"download"}, d.packages...)
	if err := apt(ctx, dir, get...); err != nil {
		// The lists are outdated: they name versions that the mirror no longer has.
		return errors.Join(apt(ctx, dir, "update"), apt(ctx, dir, get...))
	}
	return nil
}

// readDebs reads the packages in dir, except the kernels.
func readDebs(ctx context.Context, dir string, names []string) (debian, error) {
	d := debian{}
	for _, n := range names {
		if strings.HasPrefix(n, "linux-image-") {
			continue
		}
		if err := d.read(ctx, filepath.Join(dir, n)); err != nil {
			return nil, fmt.Errorf("%s: %w", n, err)
		}
	}
	return d, nil
}

func (d debian) read(ctx context.Context, file string) error {
	// Both busybox packages contain bin/busybox, so rename the one from busybox-static.
	rename := strings.NewReplacer()
	if strings.HasPrefix(filepath.Base(file), "busybox-static_") {
		rename = strings.NewReplacer("bin/busybox", "bin/busybox-static")
	}
	out, err := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", file).Output()
	if err != nil {
		return err
	}
	for r := tar.NewReader(bytes.NewReader(out)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		d[rename.Replace(path.Clean(h.Name))] = &entry{typ: h.Typeflag, mode: h.Mode, data: data, link: h.Linkname}
	}
}

// find returns the file with the given path. It follows symbolic links.
func (d debian) find(name string) (*entry, error) {
	for range 8 {
		e := d[name]
		if e == nil {
			return nil, fmt.Errorf("no package contains %s", name)
		}
		if e.typ != tar.TypeSymlink {
			return e, nil
		}
		if path.IsAbs(e.link) {
			name = e.link[1:]
		} else {
			name = path.Join(path.Dir(name), e.link)
		}
	}
	return nil, fmt.Errorf("too many symbolic links at %s", name)
}

// install copies the program src from the packages to dst in t, together with the program's loader and libraries.
func (d debian) install(t tree, src, dst string) error {
	e, err := d.find(src)
	if err != nil {
		return err
	}
	t.file(dst, 0o755, e.data)
	return d.libraries(t, e.data)
}

// libraries copies to t the loader and libraries that an ELF file needs. It puts the libraries where the loader finds
// them.
func (d debian) libraries(t tree, data []byte) error {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return err
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	if interp := f.Section(".interp"); interp != nil {
		loader, err := interp.Data()
		if err != nil {
			return err
		}
		name := strings.Trim(string(loader), "/\x00")
		e, err := d.find(name)
		if err != nil {
			return err
		}
		t.file(name, 0o755, e.data)
	}
	for _, lib := range needed {
		if err := d.library(t, lib); err != nil {
			return err
		}
	}
	return nil
}

func (d debian) library(t tree, lib string) error {
	for name := range d {
		dir := path.Dir(name)
		if path.Base(name) != lib || path.Base(path.Dir(dir)) != "lib" {
			continue
		}
		if t[name] != nil {
			return nil
		}
		e, err := d.find(name)
		if err != nil {
			return err
		}
		t.file(name, 0o644, e.data)
		return d.libraries(t, e.data)
	}
	return fmt.Errorf("no package contains the library %s", lib)
}
