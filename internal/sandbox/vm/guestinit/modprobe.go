package guestinit

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// aliasFile lists the names by which the kernel asks for modules, with the modules' paths in loading order. hack/images makes it.
const aliasFile = "/lib/modules/aliases"

// Modprobe loads the module with the name or alias that is the last argument, as the kernel asks for it: modprobe -q -- NAME.
// It returns the exit code.
func Modprobe(args []string) int {
	if len(args) == 0 {
		say("usage: modprobe [-q] [--] NAME")
		return 2
	}
	err := LoadModule(args[len(args)-1])
	if err != nil && args[0] != "-q" {
		report("modprobe "+args[len(args)-1], err)
	}
	if err != nil {
		return 1
	}
	return 0
}

// LoadModule loads the modules with a name or alias, such as devname:net/tun, and those that they need, unless they are loaded.
// If there are several, those that the processor does not support may fail. The error is os.ErrNotExist if the guest has none.
func LoadModule(name string) error {
	list, err := os.ReadFile(aliasFile)
	if err != nil {
		return err
	}
	failed := error(&os.PathError{Op: "load module", Path: name, Err: os.ErrNotExist})
	loaded := false
	for _, paths := range modulesOf(string(list), name) {
		if err := loadInOrder(paths); err != nil {
			failed = err
		} else {
			loaded = true
		}
	}
	if loaded {
		return nil
	}
	return failed
}

func loadInOrder(paths []string) error {
	for _, path := range paths {
		if err := loadModule(path); err != nil && !errors.Is(err, unix.EEXIST) {
			return &os.PathError{Op: "load module", Path: path, Err: err}
		}
	}
	return nil
}

// modulesOf returns the paths in each line of a list that begins with the name. The characters - and _ are equal in names.
func modulesOf(list, name string) (found [][]string) {
	name = strings.ReplaceAll(name, "-", "_")
	for line := range strings.Lines(list) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == name {
			found = append(found, fields[1:])
		}
	}
	return found
}
