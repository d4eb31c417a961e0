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

// packages are Debian's packages that the images are made of. They are downloaded and read, not installed, so what
// the host has installed does not matter.
var packages = []string{"busybox", "busybox-static", "nginx", "libc6", "libcrypt1", "libpcre2-8-0", "libssl3", "zlib1g"}

// uriLine is a line of `apt-get download --print-uris`: 'URI' FILE SIZE HASH. The file name holds the version.
var uriLine = regexp.MustCompile(`(?m)^'[^']+' (\S+\.deb) `)

// debNames asks apt for the files of the packages' current versions, renewing its lists when it knows none.
func debNames(ctx context.Context) ([]string, error) {
	ask := func() []string {
		out, _ := exec.CommandContext(ctx, "apt-get", append([]string{"download", "--print-uris", "-qq"}, packages...)...).Output()
		var names []string
		for _, m := range uriLine.FindAllStringSubmatch(string(out), -1) {
			names = append(names, m[1])
		}
		slices.Sort(names)
		return names
	}
	names := ask()
	if len(names) != len(packages) {
		if err := apt(ctx, "", "update"); err != nil {
			return nil, err
		}
		names = ask()
	}
	if len(names) != len(packages) {
		return nil, fmt.Errorf("apt-get knows %d of the packages %v", len(names), packages)
	}
	return names, nil
}

// apt runs apt-get in dir. As root, apt would rather download as another user, who cannot write there.
func apt(ctx context.Context, dir string, args ...string) error {
	c := exec.CommandContext(ctx, "apt-get", append([]string{"-qq", "-o", "APT::Sandbox::User=root"}, args...)...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, out)
	}
	return nil
}

// debian is the content of the packages: files by path without a leading slash.
type debian map[string]*entry

// readDebs downloads what is missing in dir and reads the named packages.
func readDebs(ctx context.Context, dir string, names []string) (debian, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	missing := func(n string) bool { _, err := os.Stat(filepath.Join(dir, n)); return err != nil }
	if slices.ContainsFunc(names, missing) {
		// Lists that have grown old name versions that the mirror no longer has.
		if err := apt(ctx, dir, append([]string{"download"}, packages...)...); err != nil {
			if err := errors.Join(apt(ctx, dir, "update"), apt(ctx, dir, append([]string{"download"}, packages...)...)); err != nil {
				return nil, err
			}
		}
	}
	d := debian{}
	for _, n := range names {
		if err := d.read(ctx, filepath.Join(dir, n)); err != nil {
			return nil, fmt.Errorf("%s: %w", n, err)
		}
	}
	return d, nil
}

func (d debian) read(ctx context.Context, file string) error {
	// busybox-static and busybox both hold bin/busybox: the static one gets a name of its own.
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

// find returns the file at name, following symbolic links.
func (d debian) find(name string) (*entry, error) {
	for range 8 {
		e := d[name]
		if e == nil {
			return nil, fmt.Errorf("no package has %s", name)
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
	return nil, fmt.Errorf("too many links at %s", name)
}

// install puts the program src of the packages into t as dst, with the loader and the libraries it needs.
func (d debian) install(t tree, src, dst string) error {
	e, err := d.find(src)
	if err != nil {
		return err
	}
	t.file(dst, 0o755, e.data)
	return d.libraries(t, e.data)
}

// libraries puts what the ELF file needs into t, where the loader looks for it.
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
	return fmt.Errorf("no package has the library %s", lib)
}
