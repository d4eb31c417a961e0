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
	"github.com/tripod-run/tripod/test/races"
)

// Main is the TestMain of packages that use the suite. It builds the guests' images on the host, which has a network,
// and then runs the tests as root in their own namespaces.
func Main(m *testing.M) {
	testns.Reenter()
	if testns.Inside() {
		os.Exit(races.Run(m.Run))
	}
	root, err := repository()
	if err == nil {
		build := exec.Command(filepath.Join(root, "hack/images.sh"), "build")
		build.Stderr = os.Stderr
		err = build.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build the guests' images:", err)
		os.Exit(1)
	}
	os.Exit(testns.Run(append([]string{"/proc/self/exe"}, os.Args[1:]...), testns.Options{Strict: true}))
}

// FindGuest returns the test guest in build/images. If full is set, it returns the guest whose kernel supports 9p and
// needs twice the memory.
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
	g := Guest{Kernel: filepath.Join(dir, "vmlinux"+suffix), Initrd: filepath.Join(dir, "initrd"+suffix),
		Disk: filepath.Join(dir, "disk.qcow2")}
	for _, file := range []string{g.Kernel, g.Initrd, g.Disk} {
		if _, err := os.Stat(file); err != nil {
			t.Fatalf("%v: run hack/images.sh build", err)
		}
	}
	return g
}

func FindVirtiofsd(t testing.TB) string {
	t.Helper()
	program, err := virtiofsd.Find("")
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// repository returns the root of the source tree. It searches upward from the working directory, which go test sets to
// the package's directory.
func repository() (string, error) {
	at, err := os.Getwd()
	for ; err == nil && at != "/"; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			return at, nil
		}
	}
	return "", fmt.Errorf("the working directory is not in the repository: %w", err)
}

// Cgroups opens the cgroup hierarchies of the test's namespaces.
func Cgroups(t testing.TB) cgroup.Tree {
	t.Helper()
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, testns.Cgroup())
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// NewCgroup implements Subject.NewCgroup. It removes the cgroup when the test ends. The cgroup must then be empty.
func NewCgroup(t testing.TB, name string, memory int64) string {
	t.Helper()
	tree := Cgroups(t)
	dir := path.Join(tree.Parent, cgroup.Mark+name)
	must(t, tree.Create(dir))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if t.Failed() {
			_ = tree.Kill(ctx, dir)
		}
		must(t, tree.Remove(ctx, dir))
	})
	if memory > 0 {
		file := "memory.limit_in_bytes"
		if tree.V2 {
			file = "memory.max"
		}
		must(t, tree.Apply(dir, []cgroup.Write{{Controller: "memory", File: file, Value: strconv.FormatInt(memory, 10)}}))
	}
	return dir
}
