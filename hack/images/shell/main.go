// Command shell is /bin/sh in the Kubernetes test images. It runs bash if a variable has an invalid name ("data-1"),
// because Debian's ash would drop the variable. Otherwise it runs ash, because the tests expect ash's messages.
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
	// Both shells look at the name by which they are called. The name sh makes them POSIX shells.
	err := syscall.Exec(program, os.Args, os.Environ()) //nolint:forbidigo // it opens nothing that could be inherited
	fmt.Fprintln(os.Stderr, "sh:", err)
	os.Exit(127)
}
