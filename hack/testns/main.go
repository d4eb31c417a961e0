// Command testns runs a command as root in new namespaces, with the loopback interface up and with its own directory
// and cgroup. It leaves nothing behind. See package test/harness/testns.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/tripod-run/tripod/test/harness/testns"
)

func main() {
	testns.Reenter()
	strict := flag.Bool("strict", false, "fail when the command leaves processes running")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "usage: testns [-strict] COMMAND [ARG...]\n\n"+
			"Runs COMMAND in new network, mount, PID, IPC and UTS namespaces and exits with its code.\n"+
			"It sets $%s (a directory) and $%s (a cgroup path); both are removed afterwards.\n", testns.EnvDir, testns.EnvCgroup)
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	os.Exit(testns.Run(flag.Args(), testns.Options{Strict: *strict}))
}
