// Numbers is a module that publishes "NAME 1", "NAME 2" … up to a number on the channel "out", as fast as it can and from
// its first moment on. Its arguments are the name and the number.
package main

import (
	"os"
	"strconv"
)

func main() {
	last, err := strconv.Atoi(os.Args[2])
	if err != nil {
		fail(err)
	}
	out, err := os.OpenFile("/ch/out", os.O_WRONLY, 0)
	if err != nil {
		fail(err)
	}
	for n := 1; n <= last; n++ {
		if _, err := out.WriteString(os.Args[1] + " " + strconv.Itoa(n)); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	_, _ = os.Stderr.WriteString("numbers: " + err.Error() + "\n")
	os.Exit(1)
}
