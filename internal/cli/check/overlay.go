package check

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// tryOverlay mounts an overlay of two lower layers below dir and writes to it, in a mount namespace that ends with its
// thread.
func tryOverlay(dir string) (err error) {
	trial, err := os.MkdirTemp(dir, ".tripod-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(trial)) }()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread, and with it the namespace, ends here
		done <- overlayIn(trial)
	}()
	return <-done
}

func overlayIn(trial string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare the mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	at := func(name string) string { return filepath.Join(trial, name) }
	for _, name := range []string{"lower1", "lower2", "upper", "work", "merged"} {
		if err := os.Mkdir(at(name), 0o700); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s:%s,upperdir=%s,workdir=%s", at("lower2"), at("lower1"), at("upper"), at("work"))
	if err := unix.Mount("overlay", at("merged"), "overlay", 0, options); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	err := os.WriteFile(at("merged/file"), []byte("x"), 0o600)
	return errors.Join(err, unix.Unmount(at("merged"), unix.MNT_DETACH))
}
