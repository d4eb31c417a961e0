package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const passwd = `root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/bin/false
bin:x:2:2:bin:/bin:/bin/false
www-data:x:33:33:www-data:/var/www:/bin/false
nobody:x:65534:65534:nobody:/nonexistent:/bin/false
`

const group = `root:x:0:
daemon:x:1:
bin:x:2:
www-data:x:33:
nogroup:x:65534:
`

// CRI test suites call pgrep and ipcs, which Debian's busybox lacks. These scripts replace them.
const (
	pgrep = "#!/bin/sh\n# pgrep NAME: the process IDs, one a line\npids=$(pidof \"$@\") || exit 1\nprintf '%s\\n' $pids\n"
	ipcs  = "#!/bin/sh\n# ipcs [-m|-q|-s]\ncase $1 in -q) t=msg ;; -s) t=sem ;; *) t=shm ;; esac\nexec cat /proc/sysvipc/$t\n"
)

// notApplets are applets of busybox that get no file in the images, because they would replace other files.
var notApplets = []string{"busybox", "linuxrc", "rpm", "rpm2cpio"}

// base returns the root file system of nearly every image: busybox, its applets, users and the usual directories.
//
// The applets are hard links, because symbolic links break when a test mounts something over /bin/busybox. The shell
// comes from the plain busybox package. The shell from busybox-static would run applets without looking up their files,
// which would make it impossible to test masked and read-only paths.
func (d debian) base(ctx context.Context, scratch string) (tree, error) {
	box, err := d.find("bin/busybox-static")
	if err != nil {
		return nil, err
	}
	applets, err := listApplets(ctx, box.data, scratch)
	if err != nil {
		return nil, err
	}
	t := tree{}
	t.dir(0o755, "dev", "etc", "home", "mnt", "proc", "root", "run", "sbin", "sys", "usr/bin", "usr/sbin", "var/log", "var/run", "var/www")
	t.dir(0o1777, "tmp", "var/tmp")
	t.file("bin/busybox", 0o755, box.data)
	for _, a := range applets {
		t.hardlink("bin/"+a, "bin/busybox")
	}
	if err := d.install(t, "bin/busybox", "bin/sh"); err != nil {
		return nil, err
	}
	t.hardlink("bin/ash", "bin/sh")
	t.file("bin/pgrep", 0o755, []byte(pgrep))
	t.file("bin/ipcs", 0o755, []byte(ipcs))
	t.text("etc/passwd", passwd)
	t.text("etc/group", group)
	return t, nil
}

// listApplets runs the busybox program to list its applets.
func listApplets(ctx context.Context, program []byte, scratch string) ([]string, error) {
	file := filepath.Join(scratch, "busybox")
	if err := os.WriteFile(file, program, 0o755); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, file, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("busybox --list: %w", err)
	}
	return slices.DeleteFunc(strings.Fields(string(out)), func(a string) bool { return slices.Contains(notApplets, a) }), nil
}

// compile builds one of our small programs, statically and reproducibly.
func compile(ctx context.Context, pkg, scratch string) ([]byte, error) {
	file := filepath.Join(scratch, filepath.Base(pkg))
	c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", file, pkg)
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile %s: %w\n%s", pkg, err, out)
	}
	return os.ReadFile(file)
}
