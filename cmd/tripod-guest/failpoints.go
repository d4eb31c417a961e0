//go:build failpoints

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestnode"
)

// armAnnotation is a pod's annotation that arms fail points before the pod is made, in the syntax of failpoint.Variable.
const armAnnotation = "test/failpoints"

// armedFile says that the pod's annotation has armed its fail points. It outlives this program.
const armedFile = "/run/tripod/armed"

// startsFile has the number of this program's starts in this guest.
const startsFile = "/run/tripod/starts"

// armable lets a test arm fail points by an exec in any container, whose command is:
//
//	tripod-failpoint names              prints the names of the fail points
//	tripod-failpoint pid                prints the PID of this program
//	tripod-failpoint starts             prints how often this program was started in this guest
//	tripod-failpoint arm NAME ACTION    arms a fail point
//	tripod-failpoint left ID            prints what the guest has of a container, or "none"
func armable(b guestnode.Backend) guestnode.Backend {
	_ = os.WriteFile(startsFile, []byte(strconv.Itoa(starts()+1)), 0o600)
	return armableBackend{b}
}

// starts returns the number in startsFile.
func starts() int {
	data, _ := os.ReadFile(startsFile)
	n, _ := strconv.Atoi(string(data))
	return n
}

type armableBackend struct{ guestnode.Backend }

// Validate implements sandbox.Backend. It is the first call about a pod.
func (b armableBackend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if spec := p.Config.GetAnnotations()[armAnnotation]; c == nil && spec != "" {
		if f, err := os.OpenFile(armedFile, os.O_CREATE|os.O_EXCL, 0o600); err == nil {
			f.Close()
			name, action, _ := strings.Cut(spec, "=")
			if err := failpoint.Arm(name, action); err != nil {
				return err
			}
		}
	}
	return b.Backend.Validate(p, c)
}

// The fail points of exec are here, so that the exec that arms them does not pass them.
var (
	fpOutput = failpoint.New("vm-guest.exec.output")
	fpEnded  = failpoint.New("vm-guest.exec.ended")
)

// passingWriter passes a fail point before each write.
type passingWriter struct {
	ctx context.Context
	io.Writer
}

func (w passingWriter) Write(p []byte) (int, error) {
	if err := fpOutput.Hit(w.ctx); err != nil {
		return 0, err
	}
	return w.Writer.Write(p)
}

// Exec implements sandbox.Execer.
func (b armableBackend) Exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	if len(req.Cmd) < 2 || req.Cmd[0] != "tripod-failpoint" {
		if req.Stdout != nil {
			req.Stdout = passingWriter{ctx, req.Stdout}
		}
		code, err := b.Backend.Exec(ctx, p, c, req)
		return code, errors.Join(err, fpEnded.Hit(ctx))
	}
	switch {
	case req.Cmd[1] == "names":
		_, err := fmt.Fprintln(req.Stdout, strings.Join(failpoint.Names(), "\n"))
		return 0, err
	case req.Cmd[1] == "pid":
		_, err := fmt.Fprint(req.Stdout, os.Getpid())
		return 0, err
	case req.Cmd[1] == "starts":
		_, err := fmt.Fprint(req.Stdout, starts())
		return 0, err
	case req.Cmd[1] == "arm" && len(req.Cmd) == 4:
		return 0, failpoint.Arm(req.Cmd[2], req.Cmd[3])
	case req.Cmd[1] == "left" && len(req.Cmd) == 3:
		_, err := fmt.Fprint(req.Stdout, cmp.Or(strings.Join(leftOf(req.Cmd[2]), "\n"), "none"))
		return 0, err
	}
	return 0, errors.New("tripod-failpoint: names, pid, starts, arm NAME ACTION or left ID")
}

// leftOf returns the files, cgroups, mounts and processes whose names contain a container's ID.
func leftOf(id string) (left []string) {
	for _, root := range []string{"/run", "/scratch", "/sys/fs/cgroup"} {
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d == nil {
				return nil // removed meanwhile
			}
			if strings.Contains(d.Name(), id) {
				left = append(left, path)
			}
			if d.IsDir() && (filepath.Dir(path) == "/scratch/layers" || slices.Contains([]string{"shared", "images", "rootfs"}, d.Name())) {
				return filepath.SkipDir // files of the node, and of containers
			}
			return nil
		})
	}
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range append(files, "/proc/self/mountinfo") {
		if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), id) {
			left = append(left, file)
		}
	}
	return left
}
