// Command shell is /bin/sh of the images of Kubernetes' tests. It becomes bash where the environment has a name that is no
// identifier ("data-1"), which Debian's ash would not hand on, and ash everywhere else: the tests know ash's messages.
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
	// Both go by the name that they are called, and are a POSIX shell when that is sh.
	err := syscall.Exec(program, os.Args, os.Environ()) //nolint:forbidigo // it opens nothing that could be inherited
	fmt.Fprintln(os.Stderr, "sh:", err)
	os.Exit(127)
}
