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

// What SeaBIOS says of a disk without a boot sector, and of one with.
const (
	saysNoDevice = "SeaBIOS (version 1.16.2)\nBooting from Hard Disk...\nBoot failed: not a bootable disk\n\nNo bootable device.  Retrying in 30 seconds.\n"
	saysBooting  = "SeaBIOS (version 1.16.2)\nBooting from Hard Disk...\nBooting from 0000:7c00\n"
)

// wantNoBoot waits for the end of a machine that could not boot, and holds status and log against what the firmware said.
func (r *rig) wantNoBoot(p *sandbox.Pod, c *sandbox.Container, says string) {
	r.Helper()
	s := r.waitEnd(c)
	if s.Reason != sandbox.ReasonNoBootableDevice || s.ExitCode != sandbox.ExitStartError || !strings.Contains(s.Message, says) {
		r.Errorf("status %+v", s)
	}
	if log := r.log(p); strings.Count(log, "stderr F tripod: ") != 1 || !strings.Contains(log, "firmware: Booting from Hard Disk...") || !strings.Contains(log, says) {
		r.Errorf("log %q", log)
	}
}

// TestV5NoBootableDevice: a machine whose firmware finds nothing to boot ends, with the firmware's words in status, event and log;
// its next run may boot.
func TestV5NoBootableDevice(t *testing.T) {
	r := newRig(t)
	r.driver.firmware = saysNoDevice
	p, c := r.run("unbootable", "disk")
	r.wantNoBoot(p, c, "not a bootable disk")
	r.driver.firmware = saysBooting
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	if s := r.waitEnd(c); s.Reason != sandbox.ReasonCompleted || s.Message == "" {
		t.Errorf("the next run: %+v", s)
	}
}

// TestV5BootSectorWithoutCode: the firmware boots a disk for UEFI and hears no more of it; that disk is known to have no code.
func TestV5BootSectorWithoutCode(t *testing.T) {
	r := newRig(t)
	r.driver.firmware = saysBooting
	p := r.pod("uefi")
	c := r.create(p, "disk-uefi")
	r.must(r.StartContainer(r.ctx(), p, c))
	r.wantNoBoot(p, c, "UEFI only")
}

// TestV5CutOff: a disk whose partitions reach beyond its end is refused before it is booted.
func TestV5CutOff(t *testing.T) {
	r := newRig(t)
	p := r.pod("cut")
	_, err := r.CreateContainer(r.ctx(), p, r.container(p, "disk-cut"))
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("%v", err)
	}
}

// TestV5Recovered: a daemon that dies while it ends a machine that cannot boot leaves one that the next daemon ends, for the same
// reason: said again by the firmware, or read from the record.
func TestV5Recovered(t *testing.T) {
	failpoint.Needed(t)
	for _, point := range []string{"vm.no-boot.heard", "vm.no-boot.recorded"} {
		t.Run(point, func(t *testing.T) {
			r := newRig(t)
			r.driver.firmware = saysNoDevice
			t.Cleanup(func() { r.must(failpoint.Arm(point, "")) })
			r.must(failpoint.Arm(point, "error"))
			p, c := r.run("recovered", "disk")
			r.eventually("the firmware is heard", func() bool {
				var s state
				err := format.Read(r.config.containerFile(c.ID), &s)
				return err == nil && r.driver.guest(c.ID).heard && (s.NoBoot != "") == (point == "vm.no-boot.recorded")
			})
			r.part()
			r.must(failpoint.Arm(point, ""))
			if s := r.driver.guest(c.ID).state; s.Phase != machine.Running {
				t.Fatalf("it has ended already: %+v", s)
			}
			if point == "vm.no-boot.heard" {
				r.driver.sayAgain(c.ID)
			}
			r.open()
			r.wantNoBoot(p, c, "not a bootable disk")
		})
	}
}

// TestV5Silent: that a guest shows no sign of life is noted in its log once, over restarts of the daemon too, and it goes on; of one
// that has said something, or boots another time, nothing is noted.
func TestV5Silent(t *testing.T) {
	r := newRig(t, func(c *settings) { c.VM.BootTimeout = config.Duration(100 * time.Millisecond) })
	r.driver.firmware = saysBooting
	talks, ticks := r.run("talks", "disk")
	r.driver.mute = true
	p, c := r.run("silent", "disk")
	noted := func() int { return strings.Count(r.log(p), "no sign of life in 100ms") }
	r.eventually("the note", func() bool { return noted() == 1 })
	r.wantState(p, c, sandbox.StateRunning)
	if log := r.log(p); !strings.Contains(log, "stderr F firmware: Booting from 0000:7c00") {
		t.Errorf("log %q", log)
	}
	r.abandon()
	next, _ := r.run("silent-too", "disk")
	r.eventually("the note of another one", func() bool { return strings.Contains(r.log(next), "no sign of life") })
	if n := noted(); n != 1 {
		t.Errorf("noted %d times", n)
	}
	r.wantState(talks, ticks, sandbox.StateRunning)
	if log := r.log(talks); strings.Contains(log, "no sign of life") {
		t.Errorf("log of one that talks %q", log)
	}
}
