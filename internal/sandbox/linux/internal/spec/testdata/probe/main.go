// Command probe runs in the containers of the TestRuntimes tests. It reports its environment and the results of the
// requested actions.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// main executes the actions in its arguments (VERB:OBJECT) and prints a report. With the argument "hold" it keeps its
// namespaces alive until its parent closes its stdin.
func main() {
	if len(os.Args) == 2 && os.Args[1] == "hold" {
		fmt.Println("ready")
		_, _ = os.Stdin.Read(make([]byte, 1))
		return
	}
	text, err := json.Marshal(probe(os.Args[1:]))
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(text)
}

// report is the output; the test has the same type.
type report struct {
	Status map[string]string // /proc/self/status
	Cwd    string
	Env    []string
	Mounts map[string]string // mount point → options and optional fields
	Did    map[string]string // action → "", the error, or the content read
}

func probe(actions []string) report {
	r := report{Status: map[string]string{}, Env: os.Environ(), Mounts: map[string]string{}, Did: map[string]string{}}
	r.Cwd, _ = os.Getwd()
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		r.Status[key] = strings.Join(strings.Fields(value), " ")
	}
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		own, _, _ := strings.Cut(strings.Join(fields[5:], " "), " - ")
		r.Mounts[fields[4]] = own
	}
	for _, action := range actions {
		verb, object, _ := strings.Cut(action, ":")
		did, err := verbs[verb](object)
		if err != nil {
			did = "error: " + err.Error()
		}
		r.Did[action] = did
	}
	return r
}

var verbs = map[string]func(string) (string, error){
	"read": func(name string) (string, error) {
		text, err := os.ReadFile(name)
		return string(text[:min(len(text), 200)]), err
	},
	"list": func(name string) (string, error) {
		entries, err := os.ReadDir(name)
		return fmt.Sprint(len(entries)), err
	},
	"write": func(name string) (string, error) { return "", os.WriteFile(name, []byte("1"), 0o644) },
	"stat": func(name string) (string, error) {
		info, err := os.Stat(name)
		if err != nil {
			return "", err
		}
		return info.Mode().String(), nil
	},
	"open": func(name string) (string, error) {
		f, err := os.Open(name)
		f.Close()
		return "", err
	},
	"sethostname": func(name string) (string, error) { return "", unix.Sethostname([]byte(name)) },
	"hostname":    func(string) (string, error) { return os.Hostname() },
	"unshare":     func(string) (string, error) { return "", unix.Unshare(unix.CLONE_NEWNS) },
	"mount":       func(dir string) (string, error) { return "", unix.Mount("x", dir, "tmpfs", 0, "") },
	"pid":         func(string) (string, error) { return fmt.Sprint(os.Getpid()), nil },
	"link":        os.Readlink,
}
