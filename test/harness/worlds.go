package harness

import (
	"bytes"
	"cmp"
	_ "embed" // durations.tsv
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
		return 0, errors.New(envWorlds +
			" needs TRIPOD_BIN and the other variables that name the programs, as make sets them, because worlds that build the programs would write to the same files")
	}
	return n, nil
}

// selects reports whether arg is a flag of the test binary that selects or lists tests or benchmarks.
func selects(arg string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return slices.Contains([]string{"test.run", "test.bench", "test.fuzz", "test.list"}, name)
}

// runWorlds runs the tests of the binary self in n worlds side by side. For each world there is a child process, which
// enters the world by itself and runs its share of the tests. Its output is printed as a whole once the process has
// ended. The result is the exit code of the first process that failed, otherwise 0.
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
	seconds, err := recordedSeconds()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var (
		wg    sync.WaitGroup
		print sync.Mutex
		code  int
	)
	log := newTestLog(os.Args)
	for i, names := range divide(strings.Fields(string(out)), seconds, n) {
		if len(names) == 0 {
			continue
		}
		c := exec.Command(self, append(log.args(os.Args[1:], i), "-test.run=^("+strings.Join(names, "|")+")$")...)
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
	if err := log.join(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// testLog is the file in which the go command wants to have the variables and files that the tests use, so that it can
// cache their result (-test.testlogfile). Each world writes a file of its own. Without that flag, path is "".
type testLog struct {
	path  string
	parts []string
}

const testLogFlag = "-test.testlogfile="

func newTestLog(args []string) *testLog {
	l := &testLog{}
	for _, arg := range args {
		if path, ok := strings.CutPrefix(arg, testLogFlag); ok {
			l.path = path
		}
	}
	return l
}

// args returns the arguments for world i.
func (l *testLog) args(args []string, i int) []string {
	args = slices.Clone(args)
	if l.path != "" {
		part := fmt.Sprint(l.path, ".", i)
		l.parts = append(l.parts, part)
		args = append(args, testLogFlag+part) // the last one counts
	}
	return args
}

// join writes what the worlds have written, as if one process had. A world that has ended early may have written
// nothing.
func (l *testLog) join() error {
	if l.path == "" {
		return nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	const header = "# test log\n" // internal/testlog
	all := []byte(header)
	for _, part := range l.parts {
		text, err := os.ReadFile(part)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		all = append(append(all, "chdir "+dir+"\n"...), bytes.TrimPrefix(text, []byte(header))...)
	}
	return os.WriteFile(l.path, all, 0o600)
}

// divide divides tests among n worlds so that these take about the same time: the longest test first, each to the world
// that has least to do. Tests without a record count as a second.
func divide(tests []string, seconds map[string]float64, n int) [][]string {
	length := func(test string) float64 {
		if s, ok := seconds[test]; ok {
			return s
		}
		return 1
	}
	slices.SortStableFunc(tests, func(a, b string) int { return cmp.Compare(length(b), length(a)) })
	shares, sums := make([][]string, n), make([]float64, n)
	for _, test := range tests {
		least := 0
		for i, sum := range sums {
			if sum < sums[least] {
				least = i
			}
		}
		shares[least] = append(shares[least], test)
		sums[least] += length(test)
	}
	return shares
}

//go:embed durations.tsv
var usualDurations string

// recordedSeconds returns how long the tests of the package in the working directory took in the last run of
// `make test`, which hack/testreport has recorded, or otherwise in the run that durations.tsv is from.
func recordedSeconds() (map[string]float64, error) {
	text := usualDurations
	if last, err := os.ReadFile(filepath.Join(Root(), "build/test/durations.tsv")); err == nil {
		text += string(last)
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	pkg, err := filepath.Rel(Root(), dir)
	if err != nil {
		return nil, err
	}
	seconds := map[string]float64{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 3 || !strings.HasSuffix(f[0], "/"+pkg) {
			continue
		}
		if seconds[f[1]], err = strconv.ParseFloat(f[2], 64); err != nil {
			return nil, fmt.Errorf("durations of tests: line %q: %w", line, err)
		}
	}
	return seconds, nil
}
