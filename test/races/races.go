package races

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// variable configures the race detector of a process when it starts.
const variable = "GORACE"

// Run calls run, usually m.Run, and returns its exit code. If a process has reported a data race meanwhile, Run prints
// the report and returns at least 1. Processes that inherit the environment write their reports to a directory of Run,
// and so do those that get Env. Processes that cannot see that directory still report to stderr that they cannot open the
// file, and end with status 66.
//
// The name of a report is the PID that the process sees. Processes of different PID namespaces can replace each other's
// reports, but the run fails all the same.
func Run(run func() int) int {
	before, set := os.LookupEnv(variable)
	dir, err := reportDir()
	if err == nil {
		// By default, a process waits a second before it exits.
		err = os.Setenv(variable, strings.TrimSpace(before+" atexit_sleep_ms=0 log_path="+filepath.Join(dir, "report")))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare a directory for reports of data races:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	code := run()
	if set {
		os.Setenv(variable, before)
	} else {
		os.Unsetenv(variable)
	}
	reports, err := read(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "read the reports of data races:", err)
		return max(code, 1)
	}
	for _, report := range reports {
		fmt.Fprintf(os.Stderr, "a process that the tests started has a data race:\n%s\n", beginning(report))
		code = max(code, 1)
	}
	return code
}

// beginning cuts off what follows after the first reports of a process, which are enough to find the cause.
func beginning(report string) string {
	const most = 16 << 10 // bytes
	if len(report) <= most {
		return report
	}
	return fmt.Sprintf("%s\n… and %d bytes more", report[:most], len(report)-most)
}

// Env returns the variable for processes that do not inherit the environment. Call it while Run runs.
func Env() string { return variable + "=" + os.Getenv(variable) }

// reportDir creates a directory where processes of every user can write.
func reportDir() (string, error) {
	dir, err := os.MkdirTemp("", "races-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o777|os.ModeSticky)
}

func read(dir string) (reports []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		text, readErr := os.ReadFile(filepath.Join(dir, e.Name()))
		err = errors.Join(err, readErr)
		reports = append(reports, string(text))
	}
	return reports, err
}
