package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
)

// execDir is the directory of a program that is run by exec. It is locked as long as the process that serves the
// session lives, so that another process knows when to remove it.
type execDir struct {
	path string
	lock *os.File
}

func makeExecDir(parent string) (execDir, error) {
	for {
		path, err := os.MkdirTemp(parent, "")
		if err != nil {
			return execDir{}, err
		}
		lock, err := os.Open(path)
		if err == nil {
			err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		}
		if err == nil {
			if _, err = os.Stat(path); err == nil {
				return execDir{path, lock}, nil
			}
		}
		_ = lock.Close()
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EWOULDBLOCK) {
			return execDir{}, errors.Join(err, os.RemoveAll(path))
		}
		// Just now ReapExecs took the directory for an abandoned one.
	}
}

func (d execDir) remove() {
	_ = os.RemoveAll(d.path)
	_ = d.lock.Close()
}

// ReapExecs kills the programs whose serving process was killed, because nobody reads their output or learns their exit
// code, and removes their directories.
func ReapExecs(parent string) error {
	entries, err := os.ReadDir(parent)
	if len(entries) == 0 {
		return err
	}
	abandoned := map[string]*os.File{}
	for _, e := range entries {
		path := filepath.Join(parent, e.Name())
		lock, openErr := os.Open(path)
		if openErr == nil && unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			abandoned[path] = lock
			continue
		}
		_ = lock.Close()
	}
	if len(abandoned) > 0 {
		killAbandoned(abandoned)
	}
	for path, lock := range abandoned {
		err = errors.Join(err, os.RemoveAll(path), lock.Close())
	}
	return err
}

// killAbandoned kills the programs of the given directories. A directory has a PID file, but the PID may be reused, so
// the program must be the child of the conmon that names the directory in its command line.
func killAbandoned(dirs map[string]*os.File) {
	processes, _ := os.ReadDir("/proc")
	for _, e := range processes {
		conmon, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		dir, ok := execDirOf(strings.Split(string(raw), "\x00"))
		if !ok || dirs[dir] == nil {
			continue
		}
		x := execution{dir: dir}
		if pid, err := ReadPid(x.pidFile()); err == nil {
			if parent, err := process.ParentOf(pid); err == nil && parent == conmon {
				x.killProgram()
			}
		}
		if p, err := process.Open(conmon); err == nil {
			_ = p.KillGroup()
			p.Close()
		}
	}
}

// execDirOf returns the directory of the program that is run by the conmon with this command line.
func execDirOf(argv []string) (string, bool) {
	for i, word := range argv[:max(len(argv)-1, 0)] {
		if word == "--exec-process-spec" && filepath.Base(argv[0]) == "conmon" {
			return filepath.Dir(argv[i+1]), true
		}
	}
	return "", false
}
