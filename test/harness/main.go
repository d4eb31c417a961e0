package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/tripod-run/tripod/test/harness/testns"
)

// envInside is set in the test binary that runs inside the namespaces.
const envInside = "TRIPOD_HARNESS_INSIDE"

// envInstalled is set in a test binary that test/host runs on a host with Tripod's package.
const envInstalled = "TRIPOD_TEST_INSTALLED"

// Installed reports whether the tests run on a host with Tripod's package, against its service and in the host's own
// namespaces.
func Installed() bool { return os.Getenv(envInstalled) != "" }

// Main is the TestMain of a package that uses the harness. It runs the tests in their own namespaces, and fails if the
// tests leave a process running.
func Main(m *testing.M) { Enter(m.Run) }

// Enter calls the given function in the test's own namespaces, and exits with the function's result. It is for a
// TestMain that does more than call Main.
func Enter(run func() int) {
	testns.Reenter()
	if os.Getenv(envInside) != "" || Installed() {
		code := run()
		CloseRegistry()
		os.Exit(code)
	}
	// Build the images outside the namespaces, because the build may need the network to download packages.
	if err := command("hack/images.sh", "build"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if n, err := worlds(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	} else if n > 1 {
		os.Exit(runWorlds(self, n))
	}
	os.Setenv(envInside, "1")
	os.Exit(testns.Run(append([]string{self}, os.Args[1:]...), testns.Options{Strict: true}))
}

// Dir returns the run's own directory, which is on a disk and is removed when the tests end. Whoever sets envInstalled
// names and removes it.
func Dir() string { return os.Getenv(testns.EnvDir) }

// CgroupParent returns the cgroup path below which the tests may create cgroups. It is the same in every hierarchy.
func CgroupParent() string { return testns.Cgroup() }

// Root returns the root of the repository. It searches upward from the working directory, which is the directory of the
// test's package.
var Root = sync.OnceValue(func() string {
	dir, err := os.Getwd()
	for ; err == nil && dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	panic("the working directory is not in the repository")
})

// Binary returns the path of the tripod program under test: $TRIPOD_BIN if set, otherwise build/bin/tripod, which
// Binary builds first.
var Binary = buildOnce("TRIPOD_BIN", "build/bin/tripod", "go", "build")

// TestBinary is like Binary, with fail points and the fake backend: $TRIPOD_TEST_BIN, or build/test/bin/tripod.
var TestBinary = buildOnce("TRIPOD_TEST_BIN", "build/test/bin/tripod", "go", "build", "-tags", "failpoints")

// FailPoints returns the names of the daemon's fail points.
func FailPoints(t testing.TB) []string {
	t.Helper()
	bin, err := TestBinary()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(bin, "failpoints").Output()
	if err != nil {
		t.Fatalf("%s failpoints: %v", bin, err)
	}
	return strings.Fields(string(out))
}

// WasmBinary is like Binary, for tripod-wasm: $TRIPOD_WASM_BIN, or build/bin/tripod-wasm.
var WasmBinary = buildOnce("TRIPOD_WASM_BIN", "build/bin/tripod-wasm", "env", "CGO_ENABLED=1", "go", "build")

// buildOnce returns a function that returns the path of a program. An environment variable can name the program.
// Otherwise, the function builds the program once, at the given path in the repository, from the package of the same
// name in cmd.
func buildOnce(variable, path string, build ...string) func() (string, error) {
	return sync.OnceValues(func() (string, error) {
		bin := os.Getenv(variable)
		if bin == "" {
			bin = filepath.Join(Root(), path)
			if err := command(build[0], append(build[1:], "-o", bin, "./cmd/"+filepath.Base(path))...); err != nil {
				return "", err
			}
		}
		// The daemon starts the programs beside itself. Go's test cache knows only of files that the test itself has looked at.
		for _, name := range []string{filepath.Base(bin), "tripod-wasm", "tripod-vmwrap", "tripod-agent"} {
			_, _ = os.Stat(filepath.Join(filepath.Dir(bin), name)) // a missing one is a matter of the test that needs it
		}
		return bin, nil
	})
}

// command runs a program in the root of the repository.
func command(name string, args ...string) error {
	c := exec.Command(name, args...)
	if filepath.Base(name) != name {
		c.Path = filepath.Join(Root(), name)
	}
	c.Dir = Root()
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", c, err, out)
	}
	return nil
}
