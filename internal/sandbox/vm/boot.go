package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/firmware"
)

var (
	fpNoBootHeard    = failpoint.New("vm.no-boot.heard")
	fpNoBootRecorded = failpoint.New("vm.no-boot.recorded")
)

const (
	// The firmware is listened to after these times, each twice the last one, and again when the machine reboots. The last is
	// as long as a firmware waits that finds nothing to boot.
	listenFirst, listenMost = 250 * time.Millisecond, firmware.RetryTime
	// killTime bounds the end of a machine that cannot boot; it is tried again.
	killTime = 30 * time.Second
)

func (b *Backend) bootTimeout() time.Duration { return time.Duration(b.cfg.VM.BootTimeout) }

// watchBoot listens to the firmware of a machine for as long as that runs. A machine that cannot boot is ended; one whose guest
// shows no sign of life for vm.boot_timeout has that noted in its log.
func (b *Backend) watchBoot(h *handle, l *life, started time.Time) {
	var report firmware.Report
	var silence <-chan time.Time
	if b.bootTimeout() > 0 {
		left := time.Until(started.Add(b.bootTimeout()))
		if left < 0 { // found again: its agent has to answer first
			left = min(b.bootTimeout(), listenMost)
		}
		timer := time.NewTimer(left)
		defer timer.Stop()
		silence = timer.C
	}
	due := false
	for pause := listenFirst; ; pause = min(2*pause, listenMost) {
		if b.listen(h.ID, &report) {
			pause = listenFirst
		}
		if b.endUnbootable(h, l, &report) {
			return
		}
		if due {
			b.noteSilence(h, l, report)
			due = false
		}
		select {
		case <-l.ended:
			return
		case <-b.ctx.Done():
			return
		case <-silence:
			due = true
		case <-time.After(pause):
		}
	}
}

// listen takes what the firmware has said since it was listened to last. It tells whether the machine has rebooted.
func (b *Backend) listen(id string, report *firmware.Report) (rebooted bool) {
	said, err := b.cfg.Driver.Firmware(b.ctx, id)
	if err != nil {
		b.log.Debug("the firmware of a machine cannot be listened to", "container", id, "err", err)
	}
	return report.Read(said)
}

// endUnbootable ends a machine that cannot boot, and tells whether it did. Why is written down first: an end that a restart
// of the daemon cuts off has the same reason.
func (b *Backend) endUnbootable(h *handle, l *life, report *firmware.Report) bool {
	s, now := h.Snapshot()
	why := s.NoBoot
	switch {
	case now != l:
		return true
	case why != "": // an earlier daemon, or an earlier try
	case report.Failed:
		why = "the machine's firmware found no bootable device; it said: " + strings.Join(report.Lines, "; ")
	case report.HandedOver && s.Unbootable != "":
		why = "no bootable device: " + s.Unbootable
	default:
		return false
	}
	if err := b.refuseBoot(h, l, why, report.Lines); err != nil {
		b.log.Error("a machine that cannot boot has not ended; it is tried again", "container", h.ID, "reason", why, "err", err)
		return false
	}
	return true
}

// refuseBoot says in the container's log, in its record and in the daemon's log why a machine cannot boot, and ends it.
func (b *Backend) refuseBoot(h *handle, l *life, why string, lines []string) error {
	ctx, cancel := context.WithTimeout(b.ctx, killTime)
	defer cancel()
	if err := fpNoBootHeard.Hit(ctx); err != nil {
		return err
	}
	var noted bool
	present, err := h.Update(l, func(s *state) { noted, s.NoBoot = s.NoBoot != "", why })
	if !present {
		return nil
	}
	if !noted {
		b.log.Warn("a machine cannot boot; ending it", "container", h.ID, "reason", why)
		err = errors.Join(err, b.note(l, lines, why))
	}
	if err != nil {
		b.log.Error("that a machine cannot boot could not be written down", "container", h.ID, "err", err)
	}
	if err := fpNoBootRecorded.Hit(ctx); err != nil {
		return err
	}
	return b.force(ctx, h, l)
}

// note puts what the firmware said into the container's log, and what that means.
func (b *Backend) note(l *life, lines []string, what string) error {
	var errs []error
	for _, line := range lines {
		errs = append(errs, l.console.Note("firmware: "+line))
	}
	return errors.Join(append(errs, l.console.Note("tripod: "+what))...)
}

// noteSilence says once, in the container's log, that a guest shows no sign of life. It may be one that does not use its serial
// console, so it is let run.
func (b *Backend) noteSilence(h *handle, l *life, report firmware.Report) {
	s, _ := h.Snapshot()
	if s.Silent || b.livens(h.ID, s, l) {
		return
	}
	what := fmt.Sprintf("the guest has shown no sign of life in %s: nothing on its first serial port (console=ttyS0), no agent, nothing written to a disk. "+
		"Either it does not use them, or it did not boot: its boot loader or its kernel may be damaged, or wait on a screen (annotation tripod.dev/vm.vnc shows that)", b.bootTimeout())
	b.log.Warn("a machine may not have booted", "container", h.ID, "firmware", strings.Join(report.Lines, "; "), "timeout", b.bootTimeout())
	err := b.note(l, report.Lines, what)
	if err == nil {
		err = h.Set(func(s *state) { s.Silent = true })
	}
	if err != nil {
		b.log.Error("that a guest is silent could not be written down", "container", h.ID, "err", err)
	}
}

// livens tells whether a guest has done anything.
func (b *Backend) livens(id string, s state, l *life) bool {
	if a := l.agent.Load(); a != nil && a.Ready() || sizeOf(s.Definition.SerialLog) > s.SerialBefore {
		return true
	}
	ctx, cancel := context.WithTimeout(b.ctx, askTime)
	defer cancel()
	figures, err := b.cfg.Driver.Stats(ctx, id)
	if err != nil {
		return true // nobody knows
	}
	for _, disk := range figures.Blocks {
		if disk.WriteOps > 0 {
			return true
		}
	}
	return false
}

// sizeOf is a file's size in bytes; 0 when it is not there.
func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}
