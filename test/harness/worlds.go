package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// envWorlds is the variable with the number of worlds among which Enter divides a package's tests, 1 by default. Tests
// in one world run one after another, because the leak check covers the whole world.
const envWorlds = "TRIPOD_TEST_WORLDS"

// worlds returns the number of worlds for this run. A run of selected tests or benchmarks always has one world, so that
// its output appears while the tests run.
func worlds() (int, error) {
	n, err := strconv.Atoi(os.Getenv(envWorlds))
	if os.Getenv(envWorlds) == "" || slices.ContainsFunc(os.Args, selects) {
		return 1, nil
	}
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%s=%q: want a number of at least 1", envWorlds, os.Getenv(envWorlds))
	}
	if os.Getenv("TRIPOD_BIN") == "" {
		return 0, errors.New(envWorlds + " needs TRIPOD_BIN and the other variables that name the programs, as make sets them, because worlds that build the programs would write to the same files")
	}
	return n, nil
}

// selects reports whether arg is a flag of the test binary that selects or lists tests or benchmarks.
func selects(arg string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return slices.Contains([]string{"test.run", "test.bench", "test.fuzz", "test.list"}, name)
}

// runWorlds runs the tests of the binary self in n worlds side by side. For each world there is a child process, which
// enters the world by itself and runs every nth test. Its output is printed as a whole once the process has ended. The
// result is the exit code of the first process that failed, otherwise 0.
func runWorlds(self string, n int) int {
	list := exec.Command(self, "-test.list=.")
	list.Env = append(os.Environ(), envInside+"=1")
	out, err := list.CombinedOutput()
	if err == nil && len(out) == 0 {
		err = errors.New("it lists no tests")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n%s", list, err, out)
		return 1
	}
	shares := make([][]string, n)
	for i, name := range strings.Fields(string(out)) {
		shares[i%n] = append(shares[i%n], name)
	}
	var (
		wg    sync.WaitGroup
		print sync.Mutex
		code  int
	)
	for _, names := range shares {
		if len(names) == 0 {
			continue
		}
		c := exec.Command(self, append(os.Args[1:], "-test.run=^("+strings.Join(names, "|")+")$")...)
		var output bytes.Buffer
		c.Stdout, c.Stderr = &output, &output
		// A test run that is killed, for example at its timeout, takes its worlds with it.
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
		wg.Go(func() {
			runtime.LockOSThread() // the signal comes when the thread ends that started the process
			defer runtime.UnlockOSThread()
			err := c.Run()
			print.Lock()
			defer print.Unlock()
			os.Stdout.Write(output.Bytes())
			if err != nil {
				fmt.Fprintf(os.Stdout, "a world with %d tests failed: %v\n", len(names), err)
			}
			if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && code == 0 {
				code = exit.ExitCode()
			} else if err != nil && code == 0 {
				code = 1
			}
		})
	}
	wg.Wait()
	return code
}
