package templates

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
)

// This file makes the templates that are wanted.

// Want asks for a template for machines like the pod's, which has booted. The container is the machine, if it is one.
func (t *Set) Want(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) {
	d, _ := t.machines.Definition(p.ID)
	if d == nil || !t.fits(*d) {
		return
	}
	name, err := t.name(ctx, t.namespace(p), *d)
	if err != nil {
		t.log.Warn("no template of machines is made", "pod", p.ID, "err", err)
		return
	}
	t.ask(Wish{name, p, c, d.CPUs, d.BootMemory()})
}

// ask puts a wish into the queue, unless the template is there, in the queue or was lately in trouble.
func (t *Set) ask(w Wish) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.have[w.Name] != nil || t.queued[w.Name] || t.paused(w.Name) {
		return
	}
	select {
	case t.wanted <- w:
		t.queued[w.Name] = true
	default: // a later pod asks again
	}
}

// Start begins to run.
func (t *Set) Start(ctx context.Context) {
	ctx, t.end = context.WithCancel(ctx)
	t.making.Go(func() { t.run(ctx) })
}

// Close ends run. The machine that it is making a template of, if there is one, is removed.
func (t *Set) Close() {
	t.end()
	t.making.Wait()
}

// run loads the templates, and makes those that are wanted, until ctx ends.
func (t *Set) run(ctx context.Context) {
	t.load(ctx)
	for {
		select {
		case w := <-t.wanted:
			err := guard.Call(t.log, "make a template of machines", func() error { return t.makeFor(ctx, w) })
			if err != nil && ctx.Err() == nil {
				t.log.Warn("cannot make a template of machines", "pod", w.Pod.ID, "err", err)
			}
			t.mu.Lock()
			delete(t.queued, w.Name)
			delete(t.problems, w.Name)
			if err != nil {
				t.problems[w.Name] = err.Error()
			}
			t.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

// makeFor makes a template, unless there is one. The pod may already be removed.
func (t *Set) makeFor(ctx context.Context, w Wish) error {
	t.dropUseless(ctx)
	t.mu.Lock()
	done, room := t.have[w.Name] != nil || t.paused(w.Name), t.room()
	t.mu.Unlock()
	if done {
		return nil
	}
	if !room {
		return fmt.Errorf("the node has %d templates (vm.templates), all used in the last %s: %w", t.most, retryPause,
			errdefs.ErrResourceExhausted)
	}
	if err := t.affords(w.Memory); err != nil {
		return err
	}
	name := w.Name
	mp, mc := t.machine(w)
	defer t.making.Go(func() { t.removeMachine(ctx, mp) })
	making, cancel := context.WithTimeout(ctx, t.kind.Time)
	defer cancel()
	began := time.Now()
	if err := t.make(making, mp, mc, name); err != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.trouble(name)
		return errors.Join(err, os.RemoveAll(t.newDir(name)))
	}
	t.log.Info("made a template of machines", "template", name, "namespace", t.namespace(w.Pod), "duration", time.Since(began))
	return nil
}

// affords returns errdefs.ErrResourceExhausted if the node has no room for a template of a machine with this memory.
func (t *Set) affords(memory uint64) error {
	freeMemory, freeDisk, err := t.free()
	if err != nil {
		return err
	}
	if need := 2*t.kind.Size(memory) + margin; freeMemory < need || freeDisk < need {
		return fmt.Errorf("a template needs %s of memory and disk; the node has %s and %s: %w", resources.Quantity(need),
			resources.Quantity(freeMemory), resources.Quantity(freeDisk), errdefs.ErrResourceExhausted)
	}
	return nil
}

// freeRoom returns how much memory the node has available, and how much disk is free in a directory, in bytes.
func freeRoom(dir string) (memory, disk uint64, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	_, rest, _ := strings.Cut(string(raw), "\nMemAvailable:")
	if _, err := fmt.Sscan(rest, &memory); err != nil {
		return 0, 0, fmt.Errorf("/proc/meminfo has no MemAvailable: %w", err)
	}
	return memory << 10, fs.Bavail * uint64(fs.Bsize), nil
}

func (t *Set) newDir(name string) string { return filepath.Join(t.dir, "new-"+name) }

// make boots a machine without a network, and saves it. The machine of an interrupted daemon is one that is not in the record;
// Recover removes it.
func (t *Set) make(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container, name string) error {
	machines := t.machines
	if err := machines.CreateSandbox(ctx, mp); err != nil {
		return err
	}
	if _, err := machines.CreateContainer(ctx, mp, mc); err != nil {
		return err
	}
	if err := machines.StartContainer(ctx, mp, mc); err != nil {
		return fmt.Errorf("%w%s", err, t.machines.LastWords(mp.ID))
	}
	if err := fpBooted.Hit(ctx); err != nil {
		return err
	}
	if err := t.kind.Settle(ctx, mp.ID); err != nil {
		return err
	}
	select {
	case <-time.After(reportTime):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	d, err := machines.Definition(mp.ID)
	if d == nil {
		return fmt.Errorf("the machine is gone: %w", err)
	}
	if now, err := t.name(ctx, mp.Config.GetMetadata().GetNamespace(), *d); err != nil {
		return err
	} else if now != name {
		return fmt.Errorf("the machine differs from the pod's, or its files have changed meanwhile: %w", errdefs.ErrAborted)
	}
	return t.save(ctx, mp, name, *d)
}

// removeMachine removes the machine of a template. A machine that remains when ctx ends is removed by the next daemon.
func (t *Set) removeMachine(ctx context.Context, mp *sandbox.Pod) {
	for {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
		err := t.machines.RemoveSandbox(undo, mp)
		cancel()
		if err == nil {
			return
		}
		t.log.Error("cannot remove the machine of a template", "pod", mp.ID, "err", err)
		select {
		case <-time.After(removePause):
		case <-ctx.Done():
			return
		}
	}
}

// machine returns the unit pod of the machine of a template, and its container.
func (t *Set) machine(w Wish) (*sandbox.Pod, *sandbox.Container) {
	mp, mc := t.kind.Unit(w)
	mp.ID, mp.Netns, mp.IPs = rand.Text(), "", nil
	id := sha256.Sum256([]byte(mp.ID))
	mp.ID = hex.EncodeToString(id[:])
	mc.ID = mp.ID
	mp.Config.Metadata = &runtimeapi.PodSandboxMetadata{Name: "template-" + w.Name, Namespace: t.namespace(w.Pod), Uid: mp.ID}
	mp.Config.Hostname, mp.Config.DnsConfig, mp.Config.Linux.CgroupParent = "", nil, ""
	return mp, mc
}

// save saves the machine of a template. From then on, machines use it.
func (t *Set) save(ctx context.Context, mp *sandbox.Pod, name string, d machine.Definition) error {
	dir := t.newDir(name)
	if err := errors.Join(removeDir(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return sandbox.DiskError(err)
	}
	if err := t.machines.Driver().Save(ctx, mp.ID, dir); err != nil {
		return sandbox.DiskError(err)
	}
	for _, disk := range d.Disks {
		if !disk.ReadOnly {
			if err := copySynced(filepath.Join(dir, filepath.Base(disk.Path)), disk.Path); err != nil {
				return sandbox.DiskError(fmt.Errorf("copy the disk: %w", err))
			}
		}
	}
	if err := fpSaved.Hit(ctx); err != nil {
		return err
	}
	usage, err := fs.DiskUsage(ctx, dir)
	if err != nil {
		return err
	}
	now := time.Now()
	made := &Template{
		Name: name, Namespace: mp.Config.GetMetadata().GetNamespace(), Scope: t.scope, Definition: d, CreatedAt: now, Size: usage.Size,
		UsedAt: now,
	}
	raw, err := json.Marshal(made)
	if err != nil {
		return err
	}
	if err := atomicfile.Write(filepath.Join(dir, recordFile), raw, 0o600); err != nil {
		return sandbox.DiskError(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	to := filepath.Join(t.dir, name)
	if err := errors.Join(removeDir(to), os.Rename(dir, to)); err != nil {
		return sandbox.DiskError(err)
	}
	t.have[name] = made
	t.evict()
	return fpMade.Hit(ctx)
}

// copySynced copies a file and returns once the copy is on disk.
func copySynced(to, from string) error {
	if err := fs.CopyFile(to, from); err != nil {
		return err
	}
	f, err := os.Open(to)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// room reports whether there is room for a template, perhaps in the place of one that was not used lately. Otherwise nodes
// with many kinds of machines would make templates all the time. The caller holds mu.
func (t *Set) room() bool {
	return len(t.have) < t.most || time.Since(t.oldest().UsedAt) > retryPause
}
