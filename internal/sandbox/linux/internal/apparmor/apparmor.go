// Package apparmor loads the default AppArmor profile of containers and finds out which profiles the kernel has.
//
// The profile's text is containerd's, with our name. The package must not decide which profile a container gets; see
// package spec.
package apparmor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/contrib/apparmor"
	"github.com/containerd/errdefs"
)

// DefaultProfile is the name of the default profile.
const DefaultProfile = "tripod-default"

// parserName is the program that compiles profiles and loads them into the kernel.
const parserName = "apparmor_parser"

// profilesFile lists the loaded profiles, one "name (mode)" in each line.
const profilesFile = "sys/kernel/security/apparmor/profiles"

// Loaded reports whether the kernel has a profile. The root is the directory in which /sys is looked up: "/" except in
// tests.
func Loaded(root, name string) (bool, error) {
	text, err := os.ReadFile(filepath.Join("/", root, profilesFile))
	if err != nil {
		return false, fmt.Errorf("the loaded profiles cannot be listed: %w", err)
	}
	return slices.ContainsFunc(strings.Split(string(text), "\n"), func(line string) bool { return strings.HasPrefix(line, name+" (") }), nil
}

// FindParser returns the path of apparmor_parser. A daemon's PATH may lack /sbin.
func FindParser() (string, error) {
	path, err := exec.LookPath(parserName)
	if err == nil {
		return path, nil
	}
	if path = filepath.Join("/sbin", parserName); !errors.Is(err, exec.ErrNotFound) || !isFile(path) {
		return "", fmt.Errorf("%s is missing (Debian: apt-get install apparmor): %w", parserName, errdefs.ErrNotFound)
	}
	return path, nil
}

// LoadDefault loads the default profile, and replaces the one of an earlier version, also for running containers.
func LoadDefault(ctx context.Context, root, parser string) error {
	text, err := apparmor.DumpDefaultProfile(DefaultProfile)
	if err != nil {
		return fmt.Errorf("generate AppArmor profile %s: %w", DefaultProfile, err)
	}
	cmd := exec.CommandContext(ctx, parser, "-Kr") // without the cache, replace; the profile comes from standard input
	cmd.Stdin, cmd.WaitDelay = strings.NewReader(text), time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load AppArmor profile %s: %s: %w: %s", DefaultProfile, parser, err, strings.TrimSpace(string(out)))
	}
	loaded, err := Loaded(root, DefaultProfile)
	if err == nil && !loaded {
		err = fmt.Errorf("%s succeeded, but the kernel does not list the profile: %w", parser, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("load AppArmor profile %s: %w", DefaultProfile, err)
	}
	return nil
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().Type() == fs.FileMode(0)
}
