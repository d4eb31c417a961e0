// Command mmap writes to a file through a shared mapping: mmap FILE TEXT.
package main

import (
	"fmt"
	"os"
	"syscall"
)

func main() {
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(int64(len(text))); err != nil {
		return err
	}
	memory, err := syscall.Mmap(int(f.Fd()), 0, len(text), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return err
	}
	copy(memory, text)
	if err := syscall.Munmap(memory); err != nil {
		return err
	}
	return f.Sync()
}
