package boot

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// UEFI is a UEFI firmware of the node, as two raw images of flash memory.
type UEFI struct {
	// Code is the path of the firmware. Vars is the path of the template for a machine's variables.
	Code, Vars string
}

// descriptorDirs are the directories of the firmware descriptors. A file in a later directory replaces the file with
// the same name in an earlier directory.
var descriptorDirs = []string{"/usr/share/qemu/firmware", "/etc/qemu/firmware"}

// descriptor is the part of a firmware descriptor that Find needs.
type descriptor struct {
	Interfaces []string `json:"interface-types"`
	Mapping    struct {
		Device     string    `json:"device"`
		Mode       string    `json:"mode"`
		Executable flashFile `json:"executable"`
		Template   flashFile `json:"nvram-template"`
	} `json:"mapping"`
	Targets []struct {
		Architecture string   `json:"architecture"`
		Machines     []string `json:"machines"`
	} `json:"targets"`
	Features []string `json:"features"`
}

type flashFile struct {
	Filename string `json:"filename"`
	Format   string `json:"format"`
}

// FindUEFI returns the UEFI firmware for x86-64 machines of the type q35, without Secure Boot. It chooses the first suitable
// firmware in the order of the descriptors' file names, as libvirt does. If there is none, it returns
// errdefs.ErrFailedPrecondition with advice.
func FindUEFI() (UEFI, error) { return find(descriptorDirs) }

func find(dirs []string) (UEFI, error) {
	files, damaged := descriptors(dirs)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		raw, err := os.ReadFile(files[name])
		if len(raw) == 0 && err == nil {
			continue // an empty file only hides the file with the same name in an earlier directory
		}
		var d descriptor
		if err = errors.Join(err, json.Unmarshal(raw, &d)); err != nil {
			damaged = errors.Join(damaged, fmt.Errorf("firmware descriptor %s: %w", files[name], err))
			continue
		}
		found := UEFI{Code: d.Mapping.Executable.Filename, Vars: d.Mapping.Template.Filename}
		if d.suits() && isFile(found.Code) && isFile(found.Vars) {
			return found, nil
		}
	}
	err := fmt.Errorf("this node has no UEFI firmware for machines; install the package ovmf (Fedora, Arch: edk2-ovmf): %w",
		errdefs.ErrFailedPrecondition)
	return UEFI{}, errors.Join(err, damaged)
}

// descriptors returns the paths of the descriptors by their file names. It ignores missing directories. The error is about
// those that cannot be read.
func descriptors(dirs []string) (files map[string]string, damaged error) {
	files = map[string]string{}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			damaged = errors.Join(damaged, err)
		}
		for _, e := range entries {
			if filepath.Ext(e.Name()) == ".json" {
				files[e.Name()] = filepath.Join(dir, e.Name())
			}
		}
	}
	return files, damaged
}

// suits reports whether the firmware is UEFI in raw flash memory for our machines.
func (d descriptor) suits() bool {
	m := d.Mapping
	if !slices.Contains(d.Interfaces, "uefi") || m.Device != "flash" || m.Mode != "" && m.Mode != "split" || m.Executable.Format != "raw" ||
		m.Template.Format != "raw" {
		return false
	}
	if slices.Contains(d.Features, "secure-boot") || slices.Contains(d.Features, "requires-smm") {
		return false
	}
	for _, t := range d.Targets {
		q35 := func(machine string) bool { return strings.HasPrefix(machine, "pc-q35") }
		if t.Architecture == "x86_64" && slices.ContainsFunc(t.Machines, q35) {
			return true
		}
	}
	return false
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
