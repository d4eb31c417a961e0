package machinetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// Main is a TestMain: it makes the images of the guests, outside, where the network is, and runs the tests as root in
// namespaces of their own.
func Main(m *testing.M) {
	testns.Reenter()
	if testns.Inside() {
		os.Exit(m.Run())
	}
	root, err := repository()
	if err == nil {
		build := exec.Command(filepath.Join(root, "hack/images.sh"), "build")
		build.Stderr = os.Stderr
		err = build.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the images of the guests:", err)
		os.Exit(1)
	}
	os.Exit(testns.Run(append([]string{"/proc/self/exe"}, os.Args[1:]...), testns.Options{Strict: true}))
}

// FindGuest finds the test guest in build/images; full has a kernel with 9p, and needs twice the memory.
func FindGuest(t testing.TB, full bool) Guest {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	suffix := ""
	if full {
		suffix = "-full"
	}
	dir := filepath.Join(root, "build/images/vm")
	g := Guest{Kernel: filepath.Join(dir, "vmlinux"+suffix), Initrd: filepath.Join(dir, "initrd"+suffix), Disk: filepath.Join(dir, "disk.qcow2")}
	for _, file := range []string{g.Kernel, g.Initrd, g.Disk} {
		if _, err := os.Stat(file); err != nil {
			t.Fatalf("%v: run hack/images.sh build", err)
		}
	}
	return g
}

// FindVirtiofsd finds virtiofsd.
func FindVirtiofsd(t testing.TB) string {
	t.Helper()
	program, err := virtiofsd.Find("")
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// repository is the root of the source tree: go test runs a test in its package's directory.
func repository() (string, error) {
	at, err := os.Getwd()
	for ; err == nil && at != "/"; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			return at, nil
		}
	}
	return "", fmt.Errorf("the working directory is not in the repository: %w", err)
}

// Cgroups opens the hierarchies of the test's world.
func Cgroups(t testing.TB) cgroup.Tree {
	t.Helper()
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, os.Getenv(testns.EnvCgroup))
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// NewCgroup is Subject.NewCgroup. The cgroup is removed when the test ends, and must be empty then.
func NewCgroup(t testing.TB, name string, memory int64) string {
	t.Helper()
	tree := Cgroups(t)
	dir := path.Join(tree.Parent, cgroup.Mark+name)
	if err := tree.Create(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if t.Failed() {
			_ = tree.Kill(ctx, dir)
		}
		if err := tree.Remove(ctx, dir); err != nil {
			t.Error(err)
		}
	})
	if memory > 0 {
		file := "memory.limit_in_bytes"
		if tree.V2 {
			file = "memory.max"
		}
		if err := tree.Apply(dir, []cgroup.Write{{Controller: "memory", File: file, Value: strconv.FormatInt(memory, 10)}}); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
