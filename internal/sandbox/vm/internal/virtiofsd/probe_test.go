package virtiofsd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

func options(t *testing.T) Options {
	t.Helper()
	program, err := Find("")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	return Options{Program: program, Dir: dir, LogDir: dir, UID: 200001, GID: 200002}
}

// TestProbe: Probe succeeds here. Without a working virtiofsd it returns the reason.
func TestProbe(t *testing.T) {
	good := &Prober{Options: options(t)}
	for range 2 {
		if err := good.Probe(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Find("/nowhere/virtiofsd"); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "/nowhere/virtiofsd") {
		t.Errorf("Find of a missing path: got error %v, want ErrNotFound with the path", err)
	}
	if err := (&Prober{}).Probe(t.Context()); !errdefs.IsNotFound(err) {
		t.Errorf("Probe without virtiofsd: got error %v, want ErrNotFound", err)
	}
	dir, err := os.MkdirTemp("/run", "virtiofsd") // accessible to virtiofsd's user
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	script := filepath.Join(dir, ProgramName)
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho no namespaces here >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{script, "/bin/true", "/nowhere"} {
		o := options(t)
		o.Program = program
		bad := &Prober{Options: o}
		err := bad.Probe(t.Context())
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), program) ||
			program == script && !strings.Contains(err.Error(), "no namespaces here") {
			t.Errorf("Probe with %s: got error %v, want ErrFailedPrecondition with the reason", program, err)
		}
		if again := bad.Probe(t.Context()); again == nil || again.Error() != err.Error() {
			t.Errorf("second Probe with %s: got error %v, want the cached %v", program, again, err)
		}
	}
}

// TestUnmappedOwners: if the file system does not map owners, virtiofsd has the node's users, with capabilities in its
// own user namespace only.
func TestUnmappedOwners(t *testing.T) {
	o := options(t)
	for path, mapped := range map[string]bool{t.TempDir(): true, overlay(t): false} {
		servers, err := Start(t.Context(), o, []machine.Share{{Tag: "a", Path: path, Driver: machine.ShareVirtiofs}})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := servers.Conn("a")
		if err == nil {
			err = askFeatures(t.Context(), conn)
		}
		if err != nil {
			t.Fatalf("virtiofsd does not serve %s: %v; %s", path, err, servers.LastWords())
		}
		if _, err := servers.Conn("a"); !errdefs.IsNotFound(err) {
			t.Errorf("second Conn: got error %v, want ErrNotFound", err)
		}
		pid := servers.IDs()[0].Pid
		users, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
		if first := strings.Fields(string(users)); err != nil || (first[1] == "200001") != mapped || (first[1] == "0") == mapped {
			t.Errorf("uid_map for %s = %s (error %v), want mapped: %t", path, users, err, mapped)
		}
		conn.Close() // virtiofsd ends
		if err := servers.End(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			t.Errorf("process %d is still running after End", pid)
		}
	}
}

// overlay mounts an overlay, which does not map owners.
func overlay(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", at("lower"), at("upper"), at("work"))
	if err := unix.Mount("overlay", at("merged"), "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at("merged"), 0); err != nil {
			t.Error(err)
		}
	})
	return at("merged")
}
