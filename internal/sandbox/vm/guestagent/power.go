package guestagent

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

const (
	// powerOffTime bounds the run time of the guest's poweroff command.
	powerOffTime = 20 * time.Second
	// forceTime is how long the agent waits for init to power off. Init usually ends the agent soon.
	forceTime = 10 * time.Second
)

// powerOff asks the guest's init to power off. If there is no command for that, or if init does not react, the agent
// syncs and powers off itself.
func powerOff() wire.Result {
	for _, args := range [][]string{
		{"/bin/systemctl", "--no-block", "poweroff"}, {"/usr/bin/systemctl", "--no-block", "poweroff"},
		{"/sbin/poweroff"}, {"/usr/sbin/poweroff"}, {"/bin/poweroff"}, {"/bin/busybox", "poweroff"},
	} {
		if executable(args[0]) == nil && succeeds(args) {
			time.AfterFunc(forceTime, func() { _ = forcePowerOff() })
			return wire.Result{}
		}
	}
	if err := forcePowerOff(); err != nil {
		return failed(wire.ClassFailedPrecondition, err)
	}
	return wire.Result{}
}

func forcePowerOff() error {
	unix.Sync()
	return os.NewSyscallError("reboot", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

// succeeds runs a program and reports whether it exits with 0.
func succeeds(args []string) bool {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer null.Close()
	process, err := os.StartProcess(args[0], args, &os.ProcAttr{Dir: "/", Env: []string{"PATH=" + defaultPath}, Files: []*os.File{null, null, null}})
	if err != nil {
		return false
	}
	limit := time.AfterFunc(powerOffTime, func() { _ = process.Kill() })
	defer limit.Stop()
	state, err := process.Wait()
	return err == nil && state.Success()
}
