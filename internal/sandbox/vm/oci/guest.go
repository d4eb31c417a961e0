package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

const (
	// maxAnswer is the largest answer of a guest in bytes. A guest is not trusted.
	maxAnswer = 1 << 20
	// maxEvent is the largest event of a guest in bytes.
	maxEvent = 64 << 10
	// guestTime bounds the wait for a guest that does not answer yet, and short calls in it.
	guestTime = 5 * time.Second
	// rewatchMin and rewatchMax limit the pause before the events of a guest that does not answer are watched again.
	rewatchMin, rewatchMax = 20 * time.Millisecond, 5 * time.Second
)

// guestFiles are the guest's kernel, its initramfs and the disk with its root, in a directory. It implements Images with this one
// image.
type guestFiles struct{ dir string }

// guestFilesOf returns the guest's files in the configured directory or, without one, in lib/tripod/guest beside the directory of
// the program.
func guestFilesOf(c vm.Config) guestFiles {
	if c.VM.GuestDir != "" {
		return guestFiles{c.VM.GuestDir}
	}
	program, err := os.Executable()
	if err != nil {
		program = "/usr/bin/tripod"
	}
	return guestFiles{filepath.Join(filepath.Dir(filepath.Dir(program)), "lib", "tripod", "guest")}
}

// check returns errdefs.ErrNotFound if a file is missing.
func (g guestFiles) check() error {
	for _, name := range []string{"vmlinux", "initrd", guestDisk} {
		if _, err := os.Stat(filepath.Join(g.dir, name)); err != nil {
			return fmt.Errorf("the guest of machines that run containers: %w: %w (make guest; vm.guest_dir)", err, errdefs.ErrNotFound)
		}
	}
	return nil
}

const guestDisk = "root.erofs"

// disk returns the path of the disk with the guest's root, which all machines share.
func (g guestFiles) disk() string { return filepath.Join(g.dir, guestDisk) }

// Machine implements Images.
func (g guestFiles) Machine(context.Context, string) (*disk.MachineImage, error) {
	return &disk.MachineImage{Layout: disk.LayoutKernel}, nil
}

// OpenDisk implements Images.
func (g guestFiles) OpenDisk(context.Context, string, string) (*disk.Files, error) {
	f := &disk.Files{
		MachineImage: disk.MachineImage{Layout: disk.LayoutKernel}, Cmdline: guestCmdline,
		KernelPath: filepath.Join(g.dir, "vmlinux"), InitrdPath: filepath.Join(g.dir, "initrd"),
	}
	var kernelErr, initrdErr error
	f.Kernel, kernelErr = os.Open(f.KernelPath)
	f.Initrd, initrdErr = os.Open(f.InitrdPath)
	if err := errors.Join(kernelErr, initrdErr); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return f, nil
}

// CloseDisk implements Images.
func (guestFiles) CloseDisk(context.Context, string) error { return nil }

// Disks implements Images.
func (guestFiles) Disks(context.Context) ([]string, error) { return nil, nil }

// guestCmdline is the kernel's command line. A panic ends the machine. The kernel uses the memory by which the machine grows, in
// zones that it can give back most of. Without swiotlb=noforce, it would set 64 MiB aside because the machine can have memory
// above 4 GiB.
const guestCmdline = "console=ttyS0 quiet no_timer_check cryptomgr.notests panic=-1 reboot=t swiotlb=noforce memhp_default_state=online memory_hotplug.online_policy=auto-movable"

// guestAgent is the part of a connection to a guest that the backend uses; *agent.Agent implements it.
type guestAgent interface {
	Wait(ctx context.Context) error
	Stream(ctx context.Context, op wire.Op, request []byte, with sandbox.ExecRequest) (int32, error)
}

var _ guestAgent = (*agent.Agent)(nil)

// agent returns the connection to the guest of a pod.
func (o *Backend) agent(pod string) (guestAgent, error) {
	a, err := o.machines.Agent(pod)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// stream makes a call in the guest. Right after a restart of the daemon, it waits for the guest.
func (o *Backend) stream(ctx context.Context, pod string, r guestapi.Request, with sandbox.ExecRequest) (int32, error) {
	a, err := o.guestOf(pod)
	if err != nil {
		return 0, err
	}
	waiting, cancel := context.WithTimeout(ctx, guestTime)
	err = a.Wait(waiting)
	cancel()
	if err != nil {
		return 0, err
	}
	request, err := json.Marshal(r)
	if err != nil {
		return 0, err
	}
	return a.Stream(ctx, wire.OpService, request, with)
}

// call makes a call in the guest that has a body and an answer, both of which may be nil.
func (o *Backend) call(ctx context.Context, pod string, r guestapi.Request, body, answer any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	out := &agent.Buffer{Limit: maxAnswer}
	if err := o.receive(ctx, pod, r, bytes.NewReader(raw), out); err != nil {
		return err
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(out.Bytes(), answer); err != nil {
		return fmt.Errorf("the guest's answer to %s: %w: %w", r.Method, err, errdefs.ErrDataLoss)
	}
	return nil
}

// watch passes on what the guest says about its containers until the machine has ended.
func (o *Backend) watch(p *sandbox.Pod) {
	ctx := o.ctx
	for pause := rewatchMin; ctx.Err() == nil; pause = min(2*pause, rewatchMax) {
		if m, err := o.machines.Machine(p.ID); err != nil || !m.Running {
			o.machineGone(p)
			return
		}
		began := time.Now()
		err := o.settle(ctx, p)
		if err == nil {
			err = o.watchOnce(ctx, p)
		}
		if errdefs.IsFailedPrecondition(err) {
			// The guest has forgotten its pod: it has rebooted.
			o.log.Error("the guest of a pod has restarted; killing its machine", "pod", p.ID, "err", err)
			mp, mc := o.machine(p)
			if err := o.machines.StopContainer(ctx, mp, mc, 0); err != nil {
				o.log.Error("cannot kill a machine", "pod", p.ID, "err", err)
			}
		}
		o.log.Debug("the events of a guest have ended", "pod", p.ID, "err", err)
		if time.Since(began) > rewatchMax {
			pause = rewatchMin
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// machineGone ends the watch of a machine that does not run, and records that. The event about its end can have come before
// the watch began.
func (o *Backend) machineGone(p *sandbox.Pod) {
	mp, mc := o.machine(p)
	status, err := o.machines.Status(o.ctx, mp, mc)
	if err != nil {
		o.log.Error("how a pod's machine has ended is unknown", "pod", p.ID, "err", err)
	}
	o.machineEnded(sandbox.Event{PodID: p.ID, ContainerID: p.ID, Status: status})
	o.mu.Lock()
	defer o.mu.Unlock()
	if pod := o.pods[p.ID]; pod != nil { // it may be removed by now
		pod.watching = false
	}
}

// settle ends the runs of containers that the guest does not run and has not run: the order to start them did not reach it,
// or it has lost them. It also stops containers that have ended as far as the record says: a guest that did not answer has
// started them.
func (o *Backend) settle(ctx context.Context, p *sandbox.Pod) error {
	runs := map[*handle]*life{} // before the guest is asked, because a start can complete meanwhile
	for _, h := range o.ledger.All() {
		if _, l := h.Snapshot(); l != nil && h.PodID == p.ID && !l.isStarting() {
			runs[h] = l
		}
	}
	says, err := o.statuses(ctx, p.ID)
	if err != nil {
		return err
	}
	for h, l := range runs {
		if state := says[h.ID].State; state == sandbox.StateAbsent || state == sandbox.StateCreated {
			o.end(h, l, sandbox.Status{ExitCode: sandbox.ExitUnknown, Reason: sandbox.ReasonUnknown,
				Message: "the guest does not run the container"})
		}
	}
	for id, said := range says {
		h := o.ledger.Loaded(id)
		if h == nil || h.PodID != p.ID || said.State != sandbox.StateRunning {
			continue
		}
		if s, l := h.Snapshot(); l == nil && s.Phase == ledger.Exited {
			o.log.Warn("stopping a container that a guest runs, whose start has failed", "pod", p.ID, "container", id)
			if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodStop, Container: id}, guestapi.Stop{}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// watchOnce reads the guest's events until the connection ends. Until then it keeps the guest's clock.
func (o *Backend) watchOnce(ctx context.Context, p *sandbox.Pod) error {
	var clock sync.WaitGroup
	defer clock.Wait()
	keeping, stop := context.WithCancel(ctx)
	defer stop()
	clock.Go(guard.Func(o.log, "clock of a guest", func() { o.keepClock(keeping, p.ID) }))
	events := &guestapi.Lines{Limit: maxEvent, Line: func(line []byte) error {
		var e guestapi.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		o.guestReports(p, e)
		return nil
	}}
	return o.receive(ctx, p.ID, guestapi.Request{Method: guestapi.MethodEvents}, nil, events)
}

// receive makes a call and writes what the guest sends. It ends the call if a write fails.
func (o *Backend) receive(ctx context.Context, pod string, r guestapi.Request, in io.Reader, out io.Writer) error {
	calling, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	_, err := o.stream(calling, pod, r, sandbox.ExecRequest{Stdin: in, Stdout: writerFunc(func(p []byte) (int, error) {
		n, err := out.Write(p)
		if err != nil {
			cancel(err)
		}
		return n, err
	})})
	if cause := context.Cause(calling); cause != nil && (err == nil || ctx.Err() == nil) {
		return cause // a write has failed
	}
	return err
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// machineEnded is the sink of the machines' events. The end of a machine is the end of its containers.
func (o *Backend) machineEnded(e sandbox.Event) {
	if e.ContainerID == "" {
		return
	}
	o.mu.Lock()
	pod := o.pods[e.PodID]
	wanted := pod == nil || !pod.watching || pod.stopping
	if pod != nil {
		pod.stopping = true
	}
	o.mu.Unlock()
	lives := o.endAll(e.PodID, e.Status)
	if wanted {
		return
	}
	o.tasks.Go(guard.Func(o.log, "end of a pod's machine", func() {
		for _, l := range lives { // the node takes containers that still run when it hears of the pod for lost
			select {
			case <-l.ended:
			case <-o.ctx.Done():
				return
			}
		}
		o.ledger.Report(sandbox.Event{PodID: e.PodID})
	}))
}
