// Program licenses copies the license files of everything that is linked into Go programs and into the Wasm engine into a
// directory:
//
//	hack/engine.sh crates | licenses DIR PROGRAM...
//
// A program's build information names its modules, and the module cache has their files; the lines of standard input name the
// engine's crates. DIR then has one directory for each module and each crate, and one for Go itself. A module or crate without
// a license file is an error: a release must not contain it.
package main

import (
	"bufio"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// licenseFile matches the names under which modules keep their license, and the notices that go with it.
var licenseFile = regexp.MustCompile(`(?i)^((un)?licen[sc]e|copying|copyright-library|notice|patents)([.-].*)?$`)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: licenses DIR PROGRAM...")
		os.Exit(2)
	}
	if err := collect(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "licenses: %v\n", err)
		os.Exit(1)
	}
}

// collect writes the licenses of all programs' modules, and of Go, below dir.
func collect(dir string, programs []string) error {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("find the source of Go: %w", err)
	}
	if err := copyLicenses(strings.TrimSpace(string(root)), filepath.Join(dir, "go")); err != nil {
		return err
	}
	modules, err := linked(programs)
	if err != nil {
		return err
	}
	var errs []error
	for path, source := range modules {
		errs = append(errs, copyLicenses(source, filepath.Join(dir, filepath.FromSlash(path))))
	}
	errs = append(errs, collectCrates(os.Stdin, filepath.Join(dir, "crates.io")))
	return errors.Join(errs...)
}

// errNoFile: a directory has no license file.
var errNoFile = errors.New("no license file")

// collectCrates writes the licenses of the crates that the lines name: name, version, license and directory. Some crates of
// wasmtime's project have no file of their own: theirs is that of the crate wasmtime, if their license is its license.
func collectCrates(lines io.Reader, dir string) error {
	var crates [][]string
	var wasmtime []string
	for s := bufio.NewScanner(lines); s.Scan(); {
		fields := strings.Split(s.Text(), "\t")
		if len(fields) != 4 {
			return fmt.Errorf("standard input has %q, want a crate's name, version, license and directory", s.Text())
		}
		if crates = append(crates, fields); fields[0] == "wasmtime" {
			wasmtime = fields
		}
	}
	if wasmtime == nil {
		return errors.New("standard input does not name the crate wasmtime")
	}
	var errs []error
	for _, c := range crates {
		target := filepath.Join(dir, c[0]+"-"+c[1])
		err := copyLicenses(c[3], target)
		if errors.Is(err, errNoFile) && c[2] == wasmtime[2] {
			err = copyLicenses(wasmtime[3], target)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// linked returns the modules in the programs' build information: their paths and the directories of their sources.
func linked(programs []string) (map[string]string, error) {
	modules := map[string]string{}
	for _, program := range programs {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			return nil, err
		}
		for _, module := range info.Deps {
			path, version := module.Path, module.Version
			if module.Replace != nil {
				path, version = module.Replace.Path, module.Replace.Version
			}
			if modules[path] != "" {
				continue
			}
			if modules[path], err = sourceDir(path + "@" + version); err != nil {
				return nil, err
			}
		}
	}
	return modules, nil
}

// sourceDir returns the directory of a module's source in the module cache.
func sourceDir(module string) (string, error) {
	out, err := exec.Command("go", "mod", "download", "-json", module).Output()
	if err != nil {
		return "", fmt.Errorf("find the source of %s: %w", module, err)
	}
	var found struct{ Dir string }
	if err := json.Unmarshal(out, &found); err != nil || found.Dir == "" {
		return "", fmt.Errorf("find the source of %s: go mod download names no directory (%w)", module, err)
	}
	return found.Dir, nil
}

// copyLicenses copies the license files in the directory source into the directory target.
func copyLicenses(source, target string) error {
	entries, err := os.ReadDir(source)
	if err != nil {
		return err
	}
	found := false
	for _, entry := range entries {
		if !entry.Type().IsRegular() || !licenseFile.MatchString(entry.Name()) {
			continue
		}
		if err := copyFile(filepath.Join(source, entry.Name()), filepath.Join(target, entry.Name())); err != nil {
			return err
		}
		found = true
	}
	if !found {
		return fmt.Errorf("%s: %w", source, errNoFile)
	}
	return nil
}

func copyFile(source, target string) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(target, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}
