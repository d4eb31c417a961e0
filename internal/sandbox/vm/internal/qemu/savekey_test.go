package qemu

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// keyRig has the files that a SaveKey depends on. All of them have the same time of change, as in an image of a system.
type keyRig struct {
	t   *testing.T
	dir string
	cfg Config
	def machine.Definition
}

func newKeyRig(t *testing.T) *keyRig {
	r := &keyRig{t: t, dir: t.TempDir()}
	for _, name := range []string{"qemu", "vmlinux", "initrd", "root", "base", "cidata"} {
		r.write(name, "one "+name)
	}
	r.cfg = Config{Root: r.path("records"), Emulator: r.path("qemu"), Accel: AccelTCG, Logger: logger(t)}
	r.def = machine.Definition{
		Name: "a", UID: 1, CPUs: 2, CPUModel: "max", Memory: 1 << 28, Plug: true, Cmdline: "quiet", Dir: "/a",
		Kernel: &machine.File{Path: r.path("vmlinux")}, Initrd: &machine.File{Path: r.path("initrd")},
		Disks: []machine.Disk{
			{ID: "guest0", ReadOnly: true, File: machine.File{Path: r.path("root")}},
			{ID: "scratch0", File: machine.File{Path: "/a/disk"}, Base: &machine.Base{File: machine.File{Path: r.path("base")}, Format: "raw"}},
			{ID: "cidata", ReadOnly: true, File: machine.File{Path: r.path("cidata")}, Like: "one", Size: 512},
		},
	}
	return r
}

func (r *keyRig) path(name string) string { return filepath.Join(r.dir, name) }

// write replaces a file by another one of the same size, owner and time of change.
func (r *keyRig) write(name, content string) {
	r.t.Helper()
	must(r.t, os.WriteFile(r.path(name+".new"), []byte(content), 0o700))
	must(r.t, os.Chtimes(r.path(name+".new"), time.Unix(1, 0), time.Unix(1, 0)))
	must(r.t, os.Rename(r.path(name+".new"), r.path(name)))
}

// TestSaveKey: whatever a saved machine depends on changes its key, and what belongs to a single machine does not. A file that
// differs in its content only is another one.
func TestSaveKey(t *testing.T) {
	for name, c := range map[string]struct {
		change func(r *keyRig)
		same   bool
	}{
		"CPUs":                       {func(r *keyRig) { r.def.CPUs++ }, false},
		"CPU model":                  {func(r *keyRig) { r.def.CPUModel = "qemu64" }, false},
		"memory":                     {func(r *keyRig) { r.def.Memory <<= 1 }, false},
		"growth":                     {func(r *keyRig) { r.def.Growth = &machine.Growth{Boot: r.def.Memory, Memory: 1 << 40, CPUs: 9} }, false},
		"command line":               {func(r *keyRig) { r.def.Cmdline = "debug" }, false},
		"another disk":               {func(r *keyRig) { r.def.Disks = append(r.def.Disks, machine.Disk{ID: "scratch1"}) }, false},
		"kernel":                     {func(r *keyRig) { r.write("vmlinux", "two vmlinux") }, false},
		"initrd":                     {func(r *keyRig) { r.write("initrd", "two initrd") }, false},
		"no initrd":                  {func(r *keyRig) { r.def.Initrd = nil }, false},
		"root disk":                  {func(r *keyRig) { r.write("root", "two root") }, false},
		"base of a disk":             {func(r *keyRig) { r.write("base", "two base") }, false},
		"QEMU":                       {func(r *keyRig) { r.write("qemu", "two qemu") }, false},
		"accelerator":                {func(r *keyRig) { r.cfg.Accel = AccelKVM }, false},
		"nothing":                    {func(*keyRig) {}, true},
		"the same file, replaced":    {func(r *keyRig) { r.write("vmlinux", "one vmlinux") }, true},
		"a disk to read, of its own": {func(r *keyRig) { r.write("cidata", "two cidata") }, true},
		"unlike disk to read":        {func(r *keyRig) { r.def.Disks[2].Like = "other" }, false},
		"its size":                   {func(r *keyRig) { r.def.Disks[2].Size = 1024 }, false},
		"disk to write, unlike":      {func(r *keyRig) { r.def.Disks[1].Like = "other" }, false},
		"what is the machine's own": {func(r *keyRig) {
			r.def.Name, r.def.UID, r.def.Dir, r.def.Disks[1].Path = "b", 2, "/b", "/b/disk"
			r.def.NICs, r.def.Shares = []machine.NIC{{}}, []machine.Share{{}}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newKeyRig(t)
			key := func() string {
				d, err := New(r.cfg)
				must(t, err)
				defer d.Close()
				k, err := d.SaveKey(t.Context(), r.def)
				must(t, err)
				return k
			}
			before := key()
			c.change(r)
			if after := key(); (after == before) != c.same {
				t.Errorf("the key is the same: got %t, want %t", after == before, c.same)
			}
		})
	}
}

// TestSaveKeyOfGrowth: machines that boot with the same memory have the same key, whatever they grow to.
func TestSaveKeyOfGrowth(t *testing.T) {
	r := newKeyRig(t)
	d, err := New(r.cfg)
	must(t, err)
	defer d.Close()
	r.def.Growth = &machine.Growth{Boot: 64 << 20, Memory: 1 << 40, CPUs: 9}
	seen := map[string]bool{}
	for _, memory := range []uint64{64 << 20, 128 << 20} {
		r.def.Memory = memory
		key, err := d.SaveKey(t.Context(), r.def)
		must(t, err)
		seen[key] = true
	}
	if len(seen) != 1 {
		t.Errorf("keys of two machines that differ in what they grow to: got %d, want one", len(seen))
	}
}

// TestContents: one driver notices that a file was replaced.
func TestContents(t *testing.T) {
	r := newKeyRig(t)
	d, err := New(r.cfg)
	must(t, err)
	defer d.Close()
	var keys []string
	for _, text := range []string{"one root", "one root", "two root"} {
		r.write("root", text)
		k, err := d.SaveKey(t.Context(), r.def)
		must(t, err)
		keys = append(keys, k)
	}
	if keys[0] != keys[1] || keys[1] == keys[2] {
		t.Errorf("keys: got %v, want that only the third differs", keys)
	}
}

// TestCheckCopy: a cp that does not know holes is noticed before a machine needs it.
func TestCheckCopy(t *testing.T) {
	must(t, CheckCopy(t.Context()))
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "cp"), []byte("#!/bin/sh\necho unrecognized option >&2; exit 1\n"), 0o700))
	for _, path := range []string{dir, t.TempDir()} {
		t.Setenv("PATH", path)
		if err := CheckCopy(t.Context()); !errdefs.IsNotFound(err) {
			t.Errorf("cp in %s: got %v, want NotFound", path, err)
		}
	}
}
