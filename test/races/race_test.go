//go:build race

package races

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// mode makes the test binary another process.
const mode = "TRIPOD_TEST_RACES"

func TestMain(m *testing.M) {
	switch os.Getenv(mode) {
	case "":
		os.Exit(m.Run())
	case "inherits": // a test run that ignores how its process ends
		os.Exit(Run(func() int { return start("race", os.Environ()...) }))
	case "env":
		os.Exit(Run(func() int { return start("race", Env()) }))
	case "kill":
		os.Exit(Run(func() int { return start("hang", Env()) }))
	case "clean":
		os.Exit(Run(func() int { return start("none", Env()) }))
	case "race":
		race()
	case "hang":
		race()
		fmt.Println("hangs")
		select {}
	}
}

// start starts a process, kills it when it prints a line, and returns 0 even if the process fails.
func start(as string, env ...string) int {
	self, err := os.Executable()
	if err != nil {
		return 2
	}
	c := exec.Command(self)
	c.Env = append(env, mode+"="+as)
	out, err := c.StdoutPipe()
	if err != nil || c.Start() != nil {
		return 2
	}
	if n, _ := out.Read(make([]byte, 1)); n > 0 {
		_ = c.Process.Kill()
	}
	_ = c.Wait()
	return 0
}

func race() {
	n, done := 0, make(chan bool)
	go func() { n++; close(done) }()
	n++
	<-done
}

func TestReportFailsTheRun(t *testing.T) {
	for run, fails := range map[string]bool{"inherits": true, "env": true, "kill": true, "clean": false} {
		tmp := t.TempDir()
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		c := exec.Command(self)
		c.Env = append(os.Environ(), mode+"="+run, "TMPDIR="+tmp)
		out, err := c.CombinedOutput()
		if failed := c.ProcessState.ExitCode() == 1; failed != fails || failed != strings.Contains(string(out), "races.race") {
			t.Errorf("%s: %v, want a failure: %v\n%s", run, err, fails, out)
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("%s: left %v in the temporary directory, error %v", run, left, err)
		}
	}
}
