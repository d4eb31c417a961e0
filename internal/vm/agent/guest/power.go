package guest

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/vm/agent/wire"
)

// powerOffTime is how long the guest's own way of turning itself off may take to begin.
const powerOffTime = 20 * time.Second

// powerOff has the guest's init turn it off, or does it itself where there is nobody to ask: then after a sync only.
func powerOff() wire.Result {
	for _, args := range [][]string{
		{"/bin/systemctl", "--no-block", "poweroff"}, {"/usr/bin/systemctl", "--no-block", "poweroff"},
		{"/sbin/poweroff"}, {"/usr/sbin/poweroff"}, {"/bin/poweroff"}, {"/bin/busybox", "poweroff"},
	} {
		if executable(args[0]) == nil && succeeds(args) {
			return wire.Result{}
		}
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		return failed(wire.ClassFailedPrecondition, os.NewSyscallError("reboot", err))
	}
	return wire.Result{}
}

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
