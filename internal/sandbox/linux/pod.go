package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
)

var (
	fpDir        = failpoint.New("linux.create-sandbox.dir")
	fpNamespaces = failpoint.New("linux.create-sandbox.namespaces")
	fpCgroup     = failpoint.New("linux.create-sandbox.cgroup")
	fpPause      = failpoint.New("linux.create-sandbox.pause")
	fpUnpinned   = failpoint.New("linux.remove-sandbox.unpinned")
)

// CreateSandbox implements sandbox.Backend. It also completes a partly created pod.
func (b *Backend) CreateSandbox(ctx context.Context, p *sandbox.Pod) error {
	run := b.cfg.podRunDir(p.ID)
	if err := shared.MakeRunDir(p, run); err != nil {
		return err
	}
	if err := os.MkdirAll(b.cfg.podDir(p.ID), 0o700); err != nil {
		return fmt.Errorf("make the pod's directory: %w", err)
	}
	labels, err := b.labelPod(p)
	if err != nil {
		return err
	}
	state := podState{BootID: bootID()}
	if dir, ours := b.cgroups.pod(p); ours {
		state.Cgroup = dir
	}
	if err := state.write(run); err != nil {
		return err
	}
	if err := fpDir.Hit(ctx); err != nil {
		return err
	}
	at := shared.PinsOf(p, run)
	if err := shared.MakeNamespaces(p, at); err != nil {
		return err
	}
	files := shared.FilesOf(p, run)
	if err := files.MakeEtc(p, b.labels.TmpfsOption(labels.Mount), b.log); err != nil {
		return err
	}
	if err := files.MakeShm(p, b.labels.TmpfsOption(labels.Mount)); err != nil {
		return err
	}
	if err := fpNamespaces.Hit(ctx); err != nil {
		return err
	}
	if err := b.cgroups.limit(p); err != nil {
		return err
	}
	if err := fpCgroup.Hit(ctx); err != nil {
		return err
	}
	if !shared.SharesPID(p) {
		return nil
	}
	init, err := b.startPause(ctx, p, at, labels)
	if err != nil {
		return err
	}
	if err := fpPause.Hit(ctx); err != nil {
		init.Close()
		return err
	}
	b.watchPause(p.ID, init)
	state.Pause = init.ID
	return state.write(run)
}

// StopSandbox implements sandbox.Backend. The containers have already ended, so StopSandbox only has to stop the pod's
// init process, which holds the network namespace, and to release the volumes: the caller unmounts them and detaches
// their devices before it removes the containers. RemoveSandbox removes the rest.
func (b *Backend) StopSandbox(ctx context.Context, p *sandbox.Pod) error {
	return errors.Join(b.stopPause(ctx, p.ID), mnt.UnexposeAll(b.cfg.podRunDir(p.ID)))
}

func (b *Backend) RemoveSandbox(ctx context.Context, p *sandbox.Pod) error {
	dir, ours := b.cgroups.pod(p)
	if !ours {
		dir = ""
	}
	return b.removeSandbox(ctx, p.ID, dir)
}

// removeSandbox removes everything that belongs to a pod, even if the pod is not in the record. The given cgroup is the
// pod's own. If it is "", removeSandbox takes the cgroup from the pod's state file.
func (b *Backend) removeSandbox(ctx context.Context, podID, cgroup string) error {
	if err := b.stopPause(ctx, podID); err != nil {
		return err
	}
	run := b.cfg.podRunDir(podID)
	if cgroup == "" {
		if state, err := readPodState(run); err == nil {
			cgroup = state.Cgroup
		}
	}
	pins, _ := filepath.Glob(filepath.Join(run, "ns", "*"))
	for _, pin := range pins {
		if err := mnt.RemovePoint(pin); err != nil {
			return err
		}
	}
	if err := fpUnpinned.Hit(ctx); err != nil {
		return err
	}
	if err := mnt.UnexposeAll(run); err != nil {
		return err
	}
	for _, dir := range []string{"shm", "etc"} {
		if err := mnt.RemovePoint(filepath.Join(run, dir)); err != nil {
			return err
		}
	}
	if err := b.cgroups.Remove(ctx, cgroup); err != nil {
		return err
	}
	b.sampler.Forget(podID)
	if err := errors.Join(os.RemoveAll(run), ledger.RemoveFile(b.cfg.labelsFile(podID)), ledger.RemoveFile(b.cfg.podDir(podID))); err != nil {
		return err
	}
	b.labels.Release(podID)
	return nil
}

// sandboxReady reports whether all shared parts of the pod exist, except the files for /etc, which MakeEtc can
// recreate.
func (b *Backend) sandboxReady(p *sandbox.Pod) bool {
	run := b.cfg.podRunDir(p.ID)
	state, err := readPodState(run)
	if err != nil || state.BootID != bootID() {
		return false
	}
	at := shared.PinsOf(p, run)
	for _, pin := range []string{at.IPC, at.UTS, at.PID, at.User} {
		if pin != "" && !shared.IsPinned(pin) {
			return false
		}
	}
	return mnt.IsMounted(shared.FilesOf(p, run).Shm) && (at.Net == "" || shared.IsPinned(at.Net))
}

// MakeNetns implements sandbox.NetnsMaker.
func (b *Backend) MakeNetns(p *sandbox.Pod, pin string) error {
	run := b.cfg.podRunDir(p.ID)
	if err := shared.MakeRunDir(p, run); err != nil {
		return err
	}
	at := shared.PinsOf(p, run)
	at.Net = pin
	return shared.MakeUserNamespace(p.IDMap(), at)
}
