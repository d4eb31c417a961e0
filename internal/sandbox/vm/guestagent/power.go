package guestagent

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

const (
	// powerOffTime is how long the guest's own way of turning itself off may take to begin.
	powerOffTime = 20 * time.Second
	// forceTime is how long after that we may still be there: an init that obeys ends us soon.
	forceTime = 10 * time.Second
)

// powerOff has the guest's init turn it off, or does it itself, after a sync only, where there is nobody to ask or where that one
// takes no notice.
func powerOff() wire.Result {
	for _, args := range [][]string{
		{"/bin/systemctl", "--no-block", "poweroff"}, {"/usr/bin/systemctl", "--no-block", "poweroff"},
		{"/sbin/poweroff"}, {"/usr/sbin/poweroff"}, {"/bin/poweroff"}, {"/bin/busybox", "poweroff"},
	} {
		if executable(args[0]) == nil && succeeds(args) {
			time.AfterFunc(forceTime, func() { _ = force() })
			return wire.Result{}
		}
	}
	if err := force(); err != nil {
		return failed(wire.ClassFailedPrecondition, err)
	}
	return wire.Result{}
}

func force() error {
	unix.Sync()
	return os.NewSyscallError("reboot", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
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
