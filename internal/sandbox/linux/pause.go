package linux

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// A PID namespace exists as long as its first process. A pod with a shared PID namespace therefore has an init process
// that only waits and reaps: catatonit -P, in a container without conmon. That container has the pod's ID.

// catatonit returns the absolute path of catatonit, or "" if it is not installed.
func (c Config) catatonit() string {
	found, err := exec.LookPath(cmp.Or(c.Catatonit, "catatonit"))
	if err == nil {
		found, err = filepath.Abs(found)
	}
	if err != nil {
		return ""
	}
	return found
}

// startPause runs the pod's init process and pins its PID namespace. It first stops the process of an earlier attempt.
func (b *Backend) startPause(ctx context.Context, p *sandbox.Pod, at shared.Pins, labels selinux.Labels) (*process.Process, error) {
	if err := b.stopPause(ctx, p.ID); err != nil {
		return nil, err
	}
	bundle := filepath.Join(b.cfg.podRunDir(p.ID), "pause")
	rootfs := filepath.Join(bundle, "rootfs")
	// This directory is the root of the pod's init process, which is unprivileged. So the directory's mode must not
	// depend on our umask. In a user namespace, the OCI runtime makes mount points in it as the pod's root.
	if err := errors.Join(os.MkdirAll(rootfs, 0o755), os.Chmod(bundle, 0o755), os.Chmod(rootfs, 0o755), shared.Chown(p, rootfs)); err != nil {
		return nil, err
	}
	if labels.Mount != "" {
		if err := selinux.Relabel(rootfs, labels.Mount); err != nil {
			return nil, err
		}
	}
	path, _ := b.cgroups.container(p, p.ID)
	config := spec.Pause(spec.PauseInput{
		Pod: p, Host: b.host, Rootfs: rootfs, Binary: b.cfg.catatonit(), Args: []string{"-P"},
		Net: at.Net, IPC: at.IPC, UTS: at.UTS, User: at.User, CgroupsPath: path, Labels: labels,
	})
	if err := ledger.WriteJSON(filepath.Join(bundle, "config.json"), config); err != nil {
		return nil, err
	}
	pidFile := filepath.Join(bundle, "pid")
	log := filepath.Join(bundle, "log")
	if err := b.runtime.Run(ctx, log, "run", "--detach", "--bundle", bundle, "--pid-file", pidFile, p.ID); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("run the pod's init process: %s: %w", oci.LastMessage(log), err)
	}
	pid, err := oci.ReadPid(pidFile)
	if err != nil {
		return nil, err
	}
	init, err := process.Open(pid)
	if err != nil {
		return nil, err
	}
	if err := shared.PinPID(init, at.PID); err != nil {
		init.Close()
		return nil, err
	}
	return init, nil
}

// watchPause registers a pod's init process and reports an unexpected exit. After such an exit, the pod is unusable.
func (b *Backend) watchPause(podID string, init *process.Process) {
	b.mu.Lock()
	b.pauses[podID] = init
	b.mu.Unlock()
	go func() {
		<-init.Dead
		b.mu.Lock()
		mine := b.pauses[podID] == init
		if mine {
			delete(b.pauses, podID)
		}
		b.mu.Unlock()
		if mine {
			b.log.Warn("the pod's init process has ended", "pod", podID, "pid", init.Pid)
			b.ledger.Report(sandbox.Event{PodID: podID, Status: sandbox.Status{
				State: sandbox.StateExited, FinishedAt: time.Now(), ExitCode: sandbox.ExitUnknown, Reason: sandbox.ReasonUnknown,
				Message: "the process that holds the pod's PID namespace has ended",
			}})
		}
	}()
}

// stopPause kills the pod's init process, and with it every process in the PID namespace.
func (b *Backend) stopPause(ctx context.Context, podID string) error {
	b.mu.Lock()
	delete(b.pauses, podID)
	b.mu.Unlock()
	if err := b.runtime.Delete(ctx, podID); err != nil {
		return fmt.Errorf("stop the pod's init process: %w", err)
	}
	return nil
}
