package e2e

import (
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// onTerminal starts a command on a terminal. It returns the process, the keyboard and the screen, which has everything
// that the command has written.
func onTerminal(t *testing.T, c *exec.Cmd) (*exec.Cmd, io.WriteCloser, *buffer) {
	t.Helper()
	command := exec.Command("script", "-qec", "stty cols 120 rows 30; exec "+strings.Join(c.Args, " "), "/dev/null") // from Debian's bsdutils
	keys, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	screen := &buffer{}
	command.Stdout, command.Stderr = screen, screen
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	return command, keys, screen
}

// waitSuccess waits until a command on a terminal has ended, which must be with exit code 0.
func waitSuccess(t *testing.T, command *exec.Cmd, screen *buffer) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("end of %v: got error %v, screen %q; want success", command.Args, err, screen.String())
		}
	case <-time.After(waitLimit):
		_ = command.Process.Kill()
		t.Errorf("%v did not end within %v; screen %q", command.Args, waitLimit, screen.String())
	}
}
