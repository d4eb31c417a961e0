// Command shell is /bin/sh in the Kubernetes test images. If an environment variable has an invalid name ("data-1"),
// which Debian's ash would drop, it runs bash. Otherwise it runs ash, whose messages the tests expect.
package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"syscall"
)

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)

func main() {
	program := "/bin/ash"
	if slices.ContainsFunc(os.Environ(), func(v string) bool { return !identifier.MatchString(v) }) {
		program = "/bin/bash"
	}
	// Both take their mode from the name they are called by, and sh means a POSIX shell.
	err := syscall.Exec(program, os.Args, os.Environ()) //nolint:forbidigo // it opens nothing that could be inherited
	fmt.Fprintln(os.Stderr, "sh:", err)
	os.Exit(127)
}
