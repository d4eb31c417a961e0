package testns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Environment variables of a command in a world.
const (
	// EnvDir contains the path of the run's own directory, which is on a disk. The directory is removed afterwards. The
	// path is the same in each world, because Go's test cache compares the variables and the paths that a test uses.
	EnvDir = "TRIPOD_TEST_DIR"
	// EnvCgroup contains the path of the run's cgroup, which is the same in every hierarchy. The cgroups are removed
	// afterwards.
	EnvCgroup = "TRIPOD_TEST_CGROUP"

	// envInit is set in the process that becomes PID 1, and envSource to the directory that it mounts at mountPoint.
	envInit   = "TRIPOD_TESTNS_INIT"
	envSource = "TRIPOD_TESTNS_DIR"
	// mountPoint is where the run's directory is in its world. Outside, it is an empty directory.
	mountPoint = "/var/tmp/tripod-test"
	// cgroupFile has the run's cgroup, for Cgroup.
	cgroupFile = "cgroup"
	prefix     = "tripod-test-"
	// grace is the time for the command to end after a signal.
	grace = 15 * time.Second
)

// exitSetup is the exit code for a failed setup or removal and, with Options.Strict, for processes left running.
const exitSetup = 70

// Options configures Run.
type Options struct {
	// Strict makes Run return exit code 70 if the command leaves processes running.
	Strict bool
}

// Inside reports whether this process runs in a world.
func Inside() bool { return os.Getenv(EnvDir) != "" }

// Cgroup returns the path of the run's cgroup, as EnvCgroup has it, or "" outside of a world. Tests call it instead of
// reading the variable, whose value differs from run to run, so that Go can cache their results.
func Cgroup() string {
	if !Inside() {
		return ""
	}
	path, err := os.ReadFile(filepath.Join(os.Getenv(EnvDir), cgroupFile))
	if err != nil {
		panic(err) // newWorld has written it
	}
	return string(path)
}

// Reenter must be called first by every program that calls Run, because Run starts the same program as PID 1 of the
// world. In other processes Reenter returns immediately.
func Reenter() {
	if mode := os.Getenv(envInit); mode != "" {
		os.Exit(initMain(os.Args[1:], mode == "strict"))
	}
}

// Run runs a command in a new world and returns the command's exit code, or 128+n if signal n ended the command.
func Run(argv []string, o Options) int {
	// The kernel kills the world (Pdeathsig) when the thread that started it ends. So this goroutine keeps its thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	w, err := newWorld()
	if err != nil {
		return fail(err)
	}
	code, err := w.supervise(argv, o)
	if err := errors.Join(err, w.remove()); err != nil && code == 0 {
		return fail(err)
	} else if err != nil {
		fail(err)
	}
	return code
}

func fail(err error) int {
	fmt.Fprintf(os.Stderr, "testns: %v\n", err)
	return exitSetup
}

// world is the host's part of a world: directory, cgroups and lock.
type world struct {
	dir    string
	cgroup string // below the root of every hierarchy
	lock   *os.File
}

func newWorld() (*world, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("creating namespaces needs root")
	}
	base := baseDir()
	sweep(base)
	dir, err := os.MkdirTemp(base, prefix)
	if err != nil {
		return nil, err
	}
	w := &world{dir: dir, cgroup: "/" + filepath.Base(dir)}
	if w.lock, err = lock(dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := os.MkdirAll(mountPoint, 0o755); err != nil {
		return nil, err
	}
	return w, errors.Join(makeTmp(dir), os.WriteFile(filepath.Join(dir, cgroupFile), []byte(w.cgroup), 0o644))
}

// makeTmp makes the world's directory for temporary files, with the mode of /tmp, so that programs of any user can
// write there.
func makeTmp(dir string) error {
	tmp := filepath.Join(dir, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	// Mkdir applies the umask, Chmod does not.
	return errors.Join(os.Chmod(tmp, 0o777|os.ModeSticky), os.Chmod(dir, 0o755))
}

// baseDir returns TMPDIR, or /var/tmp if TMPDIR is not set or is in memory, because image layers and overlays need a
// disk.
func baseDir() string {
	var fs unix.Statfs_t
	if dir := os.Getenv("TMPDIR"); dir != "" && unix.Statfs(dir, &fs) == nil && fs.Type != unix.TMPFS_MAGIC {
		return dir
	}
	return "/var/tmp"
}

// lock takes the lock of a run's directory. A run that is alive holds this lock.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// sweep removes the files and cgroups of runs whose supervisor was killed. It skips directories younger than a minute,
// because a new run may not have its lock yet.
func sweep(base string) {
	dirs, _ := filepath.Glob(filepath.Join(base, prefix+"*"))
	for _, dir := range dirs {
		if fi, err := os.Lstat(dir); err != nil || !fi.IsDir() || time.Since(fi.ModTime()) < time.Minute {
			continue
		}
		if l, err := lock(dir); err == nil {
			if err := (&world{dir: dir, cgroup: "/" + filepath.Base(dir), lock: l}).remove(); err != nil {
				fmt.Fprintf(os.Stderr, "testns: remove the leftovers of a killed run: %v\n", err)
			}
		}
	}
}

// supervise starts this program as PID 1 of the new namespaces and waits until it has ended.
func (w *world) supervise(argv []string, o Options) (int, error) {
	mode := "lenient"
	if o.Strict {
		mode = "strict"
	}
	c := exec.Command("/proc/self/exe", argv...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.Env = append(os.Environ(), envInit+"="+mode, envSource+"="+w.dir, EnvDir+"="+mountPoint, EnvCgroup+"="+w.cgroup,
		"TMPDIR="+filepath.Join(mountPoint, "tmp"))
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  unix.SIGKILL,
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	if err := c.Start(); err != nil {
		return exitSetup, fmt.Errorf("make namespaces: %w", err)
	}
	done := make(chan struct{})
	defer close(done)
	go relay(c.Process, signals, done)
	// ProcessState has the exit code, which is the command's.
	_ = c.Wait()
	return exitCode(c.ProcessState.Sys().(syscall.WaitStatus)), nil
}

var forwarded = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT}

// relay forwards signals. The first signal starts the grace period, and the third signal kills the process. The second
// signal does not kill it, because the command gets a terminal's first ^C twice: directly and through relay.
func relay(p *os.Process, signals <-chan os.Signal, done <-chan struct{}) {
	var expired <-chan time.Time
	for n := 1; ; n++ {
		select {
		case s := <-signals:
			if n > 2 {
				_ = p.Kill()
			}
			_ = p.Signal(s)
			if expired == nil {
				expired = time.After(grace)
			}
		case <-expired:
			_ = p.Kill()
		case <-done:
			return
		}
	}
}

func exitCode(ws syscall.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// remove removes the cgroups and the directory. All processes of the run must have ended before.
func (w *world) remove() error {
	return errors.Join(RemoveCgroup(w.cgroup), os.RemoveAll(w.dir), w.lock.Close())
}

// RemoveCgroup removes a cgroup and its descendants in every hierarchy. Their processes must have ended before.
func RemoveCgroup(path string) error {
	var errs []error
	for _, root := range CgroupRoots() {
		errs = append(errs, removeCgroup(filepath.Join(root, path)))
	}
	return errors.Join(errs...)
}

// CgroupRoots returns the mount point of every cgroup hierarchy, v1 and v2.
func CgroupRoots() []string {
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil
	}
	var roots []string
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 2 && (f[2] == "cgroup" || f[2] == "cgroup2") {
			roots = append(roots, f[1])
		}
	}
	return roots
}

// removeCgroup removes a cgroup and its descendants. For each cgroup, it waits up to 5 s for the ended processes to
// leave.
func removeCgroup(dir string) error {
	children, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, c := range children {
		if c.IsDir() {
			if err := removeCgroup(filepath.Join(dir, c.Name())); err != nil {
				return err
			}
		}
	}
	for deadline := time.Now().Add(5 * time.Second); ; {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		time.Sleep(10 * time.Millisecond) // the kernel has no event for a cgroup that has become removable
	}
}
