// Package loopdev makes block devices of files, for tests.
package loopdev

import (
	"os/exec"
	"strings"
	"testing"
)

// Attach returns a loop device for the file, made with further options of losetup(8). The device is detached when the test
// ends.
func Attach(t testing.TB, file string, options ...string) (device string) {
	t.Helper()
	out, err := exec.Command("losetup", append(options, "--find", "--show", file)...).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v: %s", err, out)
	}
	device = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", device, err, out)
		}
	})
	return device
}
