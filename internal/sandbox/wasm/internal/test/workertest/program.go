// Package workertest makes a test binary a tripod-wasm without an engine, whose components are lists of words that control the
// guest. The protocol, the processes and the files are real. Begin with Main.
//
//	world=command code=7 after=10ms   exits by itself
//	world=grpc                        serves, and greets clients on its cleartext port
//	deaf                              does not exit before the grace period expires
//	invalid, limit, crash, slow       makes the compiler fail or hang
//	pause=500ms                       makes the compiler slower
//	optimise=PATH                     makes the compiler of optimised code wait until there is such a file
//	slowly                            makes the compiler of quick code refuse it
//	mismatch                          does not match its descriptors
//	apart=why                         must not share a worker
//	import=name connect=address       imports an interface, and connects to an address when its log is reopened
package workertest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dialer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
	"github.com/tripod-run/tripod/test/until"
)

// Program is the path of a copy of the test binary that all users can execute.
var Program string

// Main runs the tests of a package, or the process that a command line of tripod-wasm asks for. It does not return.
func Main(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "fingerprint":
			fmt.Println(engineOf())
			os.Exit(0)
		case "compile":
			os.Exit(fakeCompile())
		case "worker":
			os.Exit(fakeWorker(os.Args[2]))
		case "dialer":
			os.Exit(realDialer(os.Args[2]))
		}
	}
	os.Exit(races.Run(func() int { return testMain(m) }))
}

func testMain(m *testing.M) int {
	unix.Umask(0o022)
	dir, err := os.MkdirTemp("", "wasm-test-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	Program = filepath.Join(dir, launch.Name)
	if err := Install(Program, "1"); err != nil {
		panic(err)
	}
	defer removeTestCgroup()
	return m.Run()
}

// Cgroup is the parent of the workers' cgroups. It lies in the cgroup of the tests' namespaces (hack/testns.sh),
// because another namespace can have a process with the same ID.
var Cgroup = fmt.Sprintf("%s/tripod-wasm-test-%d", testns.Cgroup(), os.Getpid())

func removeTestCgroup() {
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, Cgroup)
	if err != nil {
		return
	}
	for _, dir := range tree.Dirs(Cgroup) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintln(os.Stderr, "clean up:", err)
		}
	}
}

// Install copies the test binary to path. The file path.engine determines its engine's fingerprint.
func Install(path, engine string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	if err := os.Chmod(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".engine", []byte(engine), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", raw, 0o755); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func engineOf() string {
	self, _ := os.Executable()
	raw, _ := os.ReadFile(self + ".engine")
	return "fake engine " + string(raw)
}

const (
	CodeMagic    = "code of "
	wordsSection = "words"
)

// Module returns a core module with the words in a custom section.
func Module(words string) []byte {
	section := append([]byte{byte(len(wordsSection))}, wordsSection+words...)
	m := append([]byte("\x00asm\x01\x00\x00\x00"), 0)
	m = binary.AppendUvarint(m, uint64(len(section)))
	return append(m, section...)
}

func fakeCompile() int {
	if os.Getuid() == 0 {
		fmt.Fprintln(os.Stderr, "the compiler runs as root")
		return workerapi.CompileInternal
	}
	in, err := io.ReadAll(os.Stdin)
	if err != nil {
		return workerapi.CompileInternal
	}
	var config workerapi.CompileConfig
	if err := json.Unmarshal([]byte(os.Args[2]), &config); err != nil {
		return workerapi.CompileInternal
	}
	_, in, _ = bytes.Cut(in, []byte(wordsSection))
	if name := value(strings.Fields(string(in)), "optimise", ""); name != "" && !config.Quick {
		if err := until.Poll(time.Minute, func() error { _, err := os.Stat(name); return err }); err != nil {
			return workerapi.CompileInternal
		}
	}
	if config.Quick && slices.Contains(strings.Fields(string(in)), "slowly") {
		fmt.Fprintln(os.Stderr, "unsupported instruction")
		return workerapi.CompileInvalid
	}
	switch word := strings.Fields(string(in) + " -")[0]; word {
	case "invalid":
		fmt.Fprintln(os.Stderr, `unknown import "example:none/thing"`)
		return workerapi.CompileInvalid
	case "limit":
		fmt.Fprintln(os.Stderr, "more than 2 GiB")
		return workerapi.CompileLimit
	case "crash":
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
		select {}
	case "slow":
		time.Sleep(time.Hour) // pacing: it hangs until it is killed
	case "pause=500ms":
		time.Sleep(500 * time.Millisecond) // pacing: a compilation takes a while
	}
	fmt.Printf("%s%s\n%s", CodeMagic, engineOf(), in)
	return workerapi.CompileOK
}

// realDialer runs the dialer, but without the lockdown, which is in another package.
func realDialer(argument string) int {
	var config workerapi.DialerConfig
	if err := json.Unmarshal([]byte(argument), &config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	l, err := net.FileListener(os.NewFile(workerapi.FDControl, "control"))
	if err != nil || os.Getuid() == 0 {
		fmt.Fprintln(os.Stderr, "the dialer runs as root, or has no socket:", err)
		return 2
	}
	server := dialer.New(l.(*net.UnixListener), config.Idle, slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM)
	go func() { <-stop; server.Drain() }()
	ready := os.NewFile(workerapi.FDDialerReady, "ready")
	fmt.Fprintln(ready, "ready")
	ready.Close()
	if err := server.Serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func has(words []string, word string) bool {
	for _, w := range words {
		if w == word {
			return true
		}
	}
	return false
}

func value(words []string, key, fallback string) string {
	for _, w := range words {
		if v, ok := strings.CutPrefix(w, key+"="); ok {
			return v
		}
	}
	return fallback
}

// CompilerPids finds the compilers that tests have started.
func CompilerPids(program string) []string { return Pids(program, "compile") }

// Pids finds the processes of the program in a mode that tests have started.
func Pids(program, mode string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		cmdline, _ := os.ReadFile(file)
		parent, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "status"))
		if strings.HasPrefix(string(cmdline), filepath.Base(program)+"\x00"+mode) &&
			strings.Contains(string(parent), "\nPPid:\t"+strconv.Itoa(os.Getpid())+"\n") {
			pids = append(pids, filepath.Base(filepath.Dir(file)))
		}
	}
	return pids
}

// NicenessOf returns the nice values of all compilers' threads and, if the kernel groups by session, of their sessions.
func NicenessOf(program string) (values []int) {
	for _, pid := range CompilerPids(program) {
		if group, err := os.ReadFile("/proc/" + pid + "/autogroup"); err == nil && len(group) > 0 {
			_, text, _ := strings.Cut(strings.TrimSpace(string(group)), " nice ")
			value, _ := strconv.Atoi(text)
			values = append(values, value)
		}
		threads, _ := filepath.Glob("/proc/" + pid + "/task/[0-9]*")
		for _, thread := range threads {
			tid, _ := strconv.Atoi(filepath.Base(thread))
			if raw, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil {
				values = append(values, 20-raw)
			}
		}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// WorkerPids finds the workers and dialers by their command line.
func WorkerPids(program string) (pids []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		cmdline, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
		if (strings.HasPrefix(string(cmdline), program+"\x00worker") || strings.HasPrefix(string(cmdline), program+"\x00dialer")) &&
			!strings.Contains(string(stat), ") Z ") {
			pids = append(pids, filepath.Base(dir))
		}
	}
	return pids
}
