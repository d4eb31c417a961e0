package vm

import (
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// The output of SeaBIOS for a disk without a boot sector, and for a disk with one.
const (
	outputNoDevice = "SeaBIOS (version 1.16.2)\nBooting from Hard Disk...\nBoot failed: not a bootable disk\n\nNo bootable device.  Retrying in 30 seconds.\n"
	outputBooting  = "SeaBIOS (version 1.16.2)\nBooting from Hard Disk...\nBooting from 0000:7c00\n"
)

// wantNoBoot waits for the end of a machine that could not boot, and checks that status and log contain the reason.
func (r *rig) wantNoBoot(p *sandbox.Pod, c *sandbox.Container, reason string) {
	r.Helper()
	s := r.waitEnd(c)
	if s.Reason != sandbox.ReasonNoBootableDevice || s.ExitCode != sandbox.ExitStartError || !strings.Contains(s.Message, reason) {
		r.Errorf("status = %+v, want NoBootableDevice because %q", s, reason)
	}
	if log := r.log(p); strings.Count(log, "stderr F tripod: ") != 1 || !strings.Contains(log, "firmware: Booting from Hard Disk...") || !strings.Contains(log, reason) {
		r.Errorf("log = %q, want the firmware's output and, once, %q", log, reason)
	}
}

// TestV5NoBootableDevice: a machine whose firmware finds nothing to boot is killed. Status, event and log contain the
// firmware's output, and the next run can boot.
func TestV5NoBootableDevice(t *testing.T) {
	r := newRig(t)
	r.driver.firmware = outputNoDevice
	p, c := r.run("unbootable", "disk")
	r.wantNoBoot(p, c, "not a bootable disk")
	r.driver.firmware = outputBooting
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	if s := r.waitEnd(c); s.Reason != sandbox.ReasonCompleted || s.Message == "" {
		t.Errorf("status after the next run = %+v, want reason Completed", s)
	}
}

// TestV5BootSectorWithoutCode: the firmware starts a UEFI disk and never returns, but the backend knows that the boot
// sector has no code.
func TestV5BootSectorWithoutCode(t *testing.T) {
	r := newRig(t)
	r.driver.firmware = outputBooting
	p := r.pod("uefi")
	c := r.create(p, "disk-uefi")
	r.must(r.StartContainer(r.ctx(), p, c))
	r.wantNoBoot(p, c, "UEFI only")
}

// TestV5CutOff: CreateContainer refuses a disk whose partitions reach beyond its end.
func TestV5CutOff(t *testing.T) {
	r := newRig(t)
	p := r.pod("cut")
	_, err := r.CreateContainer(r.ctx(), p, r.container(p, "disk-cut"))
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("CreateContainer error = %v, want ErrInvalidArgument because the disk is cut off", err)
	}
}

// TestV5Recovered: if the daemon dies while it kills a machine that cannot boot, the next daemon kills the machine for
// the same reason: the firmware repeats it, or the state file has it.
func TestV5Recovered(t *testing.T) {
	failpoint.Needed(t)
	for _, point := range []string{"vm.no-boot.heard", "vm.no-boot.recorded"} {
		t.Run(point, func(t *testing.T) {
			r := newRig(t)
			r.driver.firmware = outputNoDevice
			t.Cleanup(func() { r.must(failpoint.Arm(point, "")) })
			r.must(failpoint.Arm(point, "error"))
			p, c := r.run("recovered", "disk")
			r.eventually("the firmware's output is read", func() bool {
				var s state
				err := format.Read(r.config.containerFile(c.ID), &s)
				return err == nil && r.driver.guest(c.ID).firmwareRead && (s.NoBoot != "") == (point == "vm.no-boot.recorded")
			})
			r.stop()
			r.must(failpoint.Arm(point, ""))
			if s := r.driver.guest(c.ID).state; s.Phase != machine.Running {
				t.Fatalf("the machine's state = %+v, want it still running", s)
			}
			if point == "vm.no-boot.heard" {
				r.driver.repeatFirmware(c.ID)
			}
			r.open()
			r.wantNoBoot(p, c, "not a bootable disk")
		})
	}
}

// TestV5Silent: if a guest shows no sign of life, its log says so once, even if the daemon restarts, and the machine
// keeps running. The log of a guest that has written to its console does not say so.
func TestV5Silent(t *testing.T) {
	r := newRig(t, func(c *settings) { c.VM.BootTimeout = config.Duration(100 * time.Millisecond) })
	r.driver.firmware = outputBooting
	active, activeContainer := r.run("active", "disk")
	r.driver.mute = true
	p, c := r.run("silent", "disk")
	noted := func() int { return strings.Count(r.log(p), "no sign of life in 100ms") }
	r.eventually("the note", func() bool { return noted() == 1 })
	r.wantState(p, c, sandbox.StateRunning)
	if log := r.log(p); !strings.Contains(log, "stderr F firmware: Booting from 0000:7c00") {
		t.Errorf("log = %q, want the firmware's output", log)
	}
	r.restart()
	next, _ := r.run("silent-too", "disk")
	r.eventually("the note about the next silent guest", func() bool { return strings.Contains(r.log(next), "no sign of life") })
	if n := noted(); n != 1 {
		t.Errorf("the silence is noted %d times, want once", n)
	}
	r.wantState(active, activeContainer, sandbox.StateRunning)
	if log := r.log(active); strings.Contains(log, "no sign of life") {
		t.Errorf("log of the active guest = %q, want no note about silence", log)
	}
}
