package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
)

var (
	fpNoBootFound    = failpoint.New("vm.no-boot.heard")
	fpNoBootRecorded = failpoint.New("vm.no-boot.recorded")
)

const (
	// The interval between reads of the firmware's log doubles from pollMin to pollMax, and returns to pollMin when the
	// machine reboots. pollMax is the time between the firmware's own searches for a boot device.
	pollMin, pollMax = 250 * time.Millisecond, boot.RetryTime
	// killTime bounds one attempt to kill a machine that cannot boot.
	killTime = 30 * time.Second
)

func (b *Backend) bootTimeout() time.Duration { return time.Duration(b.cfg.VM.BootTimeout) }

// watchBoot polls the firmware's log while the machine runs. It kills a machine that cannot boot, and writes a message
// to the container's log if the guest shows no sign of life within vm.boot_timeout.
func (b *Backend) watchBoot(h *handle, l *life, started time.Time) {
	var report boot.Report
	console := 0 // how much of it has been read
	var silence <-chan time.Time
	if b.bootTimeout() > 0 {
		left := time.Until(started.Add(b.bootTimeout()))
		if left < 0 { // recovered after a restart of the daemon: give the agent time to answer
			left = min(b.bootTimeout(), pollMax)
		}
		timer := time.NewTimer(left)
		defer timer.Stop()
		silence = timer.C
	}
	timedOut := false
	for pause := pollMin; ; pause = min(2*pause, pollMax) {
		if b.readFirmware(h, &report, &console) {
			pause = pollMin
		}
		if b.endUnbootable(h, l, &report) {
			return
		}
		if timedOut {
			b.noteSilence(h, l, report)
			timedOut = false
		}
		select {
		case <-l.ended:
			return
		case <-b.ctx.Done():
			return
		case <-silence:
			timedOut = true
		case <-time.After(pause):
		}
	}
}

// readFirmware adds the firmware's new output to the given report. It returns whether the machine has rebooted.
// It does not notice that a machine with UEFI has rebooted, because it reads only the beginning of that machine's console.
// console is the size of what it has read there before: firmware that has failed writes nothing more, while a line that
// looks like a failure may be half of another one.
func (b *Backend) readFirmware(h *handle, report *boot.Report, console *int) (rebooted bool) {
	if s, _ := h.Snapshot(); s.Definition.UEFI != nil {
		output, err := consoleStart(s)
		if err != nil {
			b.log.Debug("cannot read the firmware's output on the console", "container", h.ID, "err", err)
		}
		*report = boot.OfConsole(output)
		report.Failed = report.Failed && len(output) == *console
		*console = len(output)
		return false
	}
	output, err := b.cfg.Driver.Firmware(b.ctx, h.ID)
	if err != nil {
		b.log.Debug("cannot read the firmware's log", "container", h.ID, "err", err)
	}
	return report.Read(output)
}

// consoleStart returns the beginning of the current run's output on the serial console.
func consoleStart(s state) (string, error) {
	f, err := os.Open(s.Definition.SerialLog)
	if err != nil {
		return "", err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.NewSectionReader(f, s.SerialBefore, boot.ConsoleSize))
	return string(raw), err
}

// endUnbootable kills a machine that cannot boot, and reports whether the watch is over. It records the reason first,
// so that the reason is the same if the daemon restarts before the machine has ended.
func (b *Backend) endUnbootable(h *handle, l *life, report *boot.Report) bool {
	s, current := h.Snapshot()
	why := s.NoBoot
	switch {
	case current != l:
		return true
	case why != "": // recorded by an earlier attempt or an earlier daemon
	case report.Failed:
		why = "the machine's firmware found no bootable device; its output: " + strings.Join(report.Lines, "; ")
	case report.HandedOver && s.Unbootable != "":
		why = "no bootable device: " + s.Unbootable
	default:
		return false
	}
	if err := b.refuseBoot(h, l, why, report.Lines); err != nil {
		b.log.Error("cannot kill a machine that cannot boot; will retry", "container", h.ID, "reason", why, "err", err)
		return false
	}
	return true
}

// refuseBoot writes the reason to the state, the daemon's log and the container's log, and kills the machine.
func (b *Backend) refuseBoot(h *handle, l *life, why string, lines []string) error {
	ctx, cancel := context.WithTimeout(b.ctx, killTime)
	defer cancel()
	if err := fpNoBootFound.Hit(ctx); err != nil {
		return err
	}
	var logged bool
	current, err := h.Update(l, func(s *state) { logged, s.NoBoot = s.NoBoot != "", why })
	if !current {
		return nil
	}
	if !logged {
		b.log.Warn("machine cannot boot; killing it", "container", h.ID, "reason", why)
		err = errors.Join(err, b.note(l, lines, why))
	}
	if err != nil {
		b.log.Error("cannot record why a machine cannot boot", "container", h.ID, "err", err)
	}
	if err := fpNoBootRecorded.Hit(ctx); err != nil {
		return err
	}
	return b.force(ctx, h, l)
}

// note writes the firmware's output, and a message that explains it, to the container's log.
func (b *Backend) note(l *life, lines []string, message string) error {
	var errs []error
	for _, line := range lines {
		errs = append(errs, l.console.Note("firmware: "+line))
	}
	return errors.Join(append(errs, l.console.Note("tripod: "+message))...)
}

// noteSilence writes to the container's log, once, that the guest shows no sign of life. The machine keeps running,
// because its guest may simply not use the serial console.
func (b *Backend) noteSilence(h *handle, l *life, report boot.Report) {
	s, _ := h.Snapshot()
	if s.Silent || b.isAlive(h.ID, s, l) {
		return
	}
	message := fmt.Sprintf("the guest has shown no sign of life in %s: no output on its first serial port (console=ttyS0), no agent, no write to a disk. "+
		"Either it uses none of them, or it did not boot: its boot loader or kernel may be damaged, or wait for input on the screen (see annotation tripod.dev/vm.vnc)", b.bootTimeout())
	b.log.Warn("machine may not have booted", "container", h.ID, "firmware", strings.Join(report.Lines, "; "), "timeout", b.bootTimeout())
	err := b.note(l, report.Lines, message)
	if err == nil {
		err = h.Set(func(s *state) { s.Silent = true })
	}
	if err != nil {
		b.log.Error("cannot record that a guest is silent", "container", h.ID, "err", err)
	}
}

// isAlive reports whether the guest has shown any activity since it was started. If isAlive cannot find out, it returns
// true.
func (b *Backend) isAlive(id string, s state, l *life) bool {
	if a := l.agent.Load(); a != nil && a.Ready() || sizeOf(s.Definition.SerialLog) > s.SerialBefore {
		return true
	}
	ctx, cancel := context.WithTimeout(b.ctx, askTime)
	defer cancel()
	figures, err := b.cfg.Driver.Stats(ctx, id)
	if err != nil {
		return true
	}
	for _, disk := range figures.Blocks {
		if disk.WriteOps > 0 {
			return true
		}
	}
	return false
}

// sizeOf returns a file's size in bytes, or 0 if the file is missing.
func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
