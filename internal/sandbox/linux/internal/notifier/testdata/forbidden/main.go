// The program makes a system call that the default seccomp profile forbids, and goes on.
package main

import (
	"fmt"
	"syscall"
	"unsafe"
)

func main() {
	path := []byte("/swap\x00")
	_, _, err := syscall.Syscall(syscall.SYS_SWAPOFF, uintptr(unsafe.Pointer(&path[0])), 0, 0)
	fmt.Println(err)
	fmt.Println("still here")
}
