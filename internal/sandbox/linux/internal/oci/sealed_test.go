package oci

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSealed: a sealed program runs and cannot be written, and its path follows a replacement of the program.
func TestSealed(t *testing.T) {
	program := filepath.Join(t.TempDir(), "crun")
	install := func(source string) {
		t.Helper()
		raw, err := os.ReadFile(source)
		if err == nil {
			err = os.WriteFile(program+".new", raw, 0o755)
		}
		if err == nil {
			err = os.Rename(program+".new", program)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	install("/bin/true")
	s := seal(program, "crun version 1.8.1")
	if s == nil {
		t.Fatal("the program was not sealed")
	}
	defer s.close()
	path := s.path()
	if err := exec.Command(path).Run(); err != nil {
		t.Errorf("run the sealed program: %v", err)
	}
	if f, err := os.OpenFile(path, os.O_WRONLY, 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("open the sealed program for writing: got %v, want %v", err, unix.EROFS)
		f.Close()
	}
	// This is what crun and runc look at.
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil || st.Flags&unix.ST_RDONLY == 0 {
		t.Errorf("statfs: got flags %#x and error %v, want read-only", st.Flags, err)
	}
	install("/bin/false")
	if again := s.path(); again != path {
		t.Errorf("path: got %s, want %s", again, path)
	}
	if err := exec.Command(path).Run(); err == nil {
		t.Error("the path leads to the replaced program")
	}
}

// TestSealedRefusals: what depends on its own path is not sealed.
func TestSealedRefusals(t *testing.T) {
	dir := t.TempDir()
	script, other := filepath.Join(dir, "crun"), filepath.Join(dir, "krun")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/bin/true", other); err != nil {
		t.Fatal(err)
	}
	for program, version := range map[string]string{
		script: "crun version 1.8.1", other: "crun version 1.8.1", "/bin/true": "true (GNU coreutils)",
	} {
		if s := seal(program, version); s != nil {
			t.Errorf("%s (%s) was sealed", program, version)
			s.close()
		}
	}
}
