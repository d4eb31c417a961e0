package qemu

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// saved boots a machine, lets it run a command, saves it and destroys it. It returns the definition, to which Saved is set.
func saved(t *testing.T, s machinetest.Subject, l *machinetest.Life, command string,
	changes ...func(*machine.Definition)) machine.Definition {
	t.Helper()
	d := s.Definition(t)
	d.Plug = true
	for _, change := range changes {
		change(&d)
	}
	dir := filepath.Join(d.StateDir, "saved")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	console := l.Boot(t, d)
	console.Type(`%s; echo sav""ed`, command)
	machinetest.AwaitLog(t, d, "saved", 1)
	if err := l.Save(t.Context(), d.Name, dir); err != nil {
		t.Fatalf("save: %v", err)
	}
	destroy(t, l, d)
	d.Saved = dir
	return d
}

// another returns a machine that continues where d was saved.
func another(t *testing.T, s machinetest.Subject, d machine.Definition) machine.Definition {
	t.Helper()
	next := s.Definition(t)
	next.Plug, next.Saved, next.Memory, next.Growth, next.Cmdline = true, d.Saved, d.Memory, d.Growth, d.Cmdline
	next.Disks[0].Base = d.Disks[0].Base
	raw, err := os.ReadFile(d.Disks[0].Path)
	if err == nil {
		err = os.WriteFile(next.Disks[0].Path, raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// TestSave: two machines continue at the same time where one was saved. They have its memory, and each has its own share and
// disk.
func TestSave(t *testing.T) {
	s := subject(t)
	l := s.Begin(t)
	defer l.Close()
	template := saved(t, s, l, "while read -r m; do insmod /lib/modules/$m.ko 2>/dev/null; done </lib/modules/virtio-0x001a; where=here")
	if info, err := os.Stat(filepath.Join(template.Saved, savedMemory)); err != nil || info.Size() != int64(template.Memory) {
		t.Errorf("saved memory: got %v (error %v), want a file of %d bytes", info, err, template.Memory)
	}
	machines := []machine.Definition{another(t, s, template), another(t, s, template)}
	consoles := make([]*machinetest.Console, len(machines))
	for i := range machines {
		machinetest.AddShare(t, &machines[i])
		start(t, l, machines[i])
		machinetest.AwaitMachines(t, machines[i], 1)
		consoles[i] = machinetest.Attach(t, machines[i])
	}
	for i, c := range consoles {
		c.Type(`until mount -t virtiofs shared /mnt 2>/dev/null; do sleep 0.1; done; echo $where machine %d >/mnt/file; sync; echo wri""tten`, i)
	}
	for i, d := range machines {
		machinetest.AwaitLog(t, d, "written", 1)
		got, err := os.ReadFile(filepath.Join(d.Shares[0].Path, "file"))
		if want := "here machine " + string(rune('0'+i)) + "\n"; err != nil || string(got) != want {
			t.Errorf("file of machine %d: got %q (error %v), want %q", i, got, err, want)
		}
		destroy(t, l, d)
	}
}

// TestSaveRefused: a machine does not continue from what another QEMU, processor or machine has saved, or from damaged files.
// The state is not to blame if there is no memory for the machine. A machine without a port for further devices is not saved.
func TestSaveRefused(t *testing.T) {
	s := subject(t)
	l := s.Begin(t)
	defer l.Close()
	template := saved(t, s, l, "true")
	file := func(name string) string { return filepath.Join(template.Saved, name) }
	const outOfMemory = "out of memory"
	for name, c := range map[string]struct {
		change func(t *testing.T, d *machine.Definition)
		says   string
	}{
		"memory": {func(_ *testing.T, d *machine.Definition) { d.Memory += 1 << 20 }, "another QEMU"},
		"disk": {func(t *testing.T, d *machine.Definition) {
			base := filepath.Join(d.StateDir, "other")
			must(t, os.WriteFile(base, make([]byte, 1<<20), 0o600))
			d.Disks[0].Base = &machine.Base{File: machine.File{Path: base}, Format: "raw"}
		}, "another QEMU"},
		"qemu":        {func(t *testing.T, _ *machine.Definition) { replace(t, file(savedKey), []byte("of another QEMU")) }, "another QEMU"},
		"no key":      {func(t *testing.T, _ *machine.Definition) { replace(t, file(savedKey), nil) }, "no such file"},
		"state":       {func(t *testing.T, _ *machine.Definition) { replace(t, file(savedState), []byte("QEVM but not quite")) }, "QEMU ended"},
		"no state":    {func(t *testing.T, _ *machine.Definition) { replace(t, file(savedState), nil) }, "no such file"},
		"memory file": {func(t *testing.T, _ *machine.Definition) { replace(t, file(savedMemory), nil) }, "no such file"},
		"size":        {func(t *testing.T, _ *machine.Definition) { replace(t, file(savedMemory), []byte("short")) }, "5 bytes"},
		outOfMemory:   {func(t *testing.T, d *machine.Definition) { d.Cgroup = s.NewCgroup(t, d.Name+"-small", 4<<20) }, "killed"},
	} {
		t.Run(name, func(t *testing.T) {
			d := another(t, s, template)
			c.change(t, &d)
			must(t, l.Define(t.Context(), d))
			err := l.Start(t.Context(), d.Name)
			if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, machine.ErrSaved) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("start: got %v, want FailedPrecondition from the saved state that says %q", err, c.says)
			}
			if refused := errors.Is(err, machine.ErrRefused); refused != (name != outOfMemory) {
				t.Errorf("the state is refused: got %t (error %v)", refused, err)
			}
			machinetest.AwaitMachines(t, d, 0)
		})
	}
	halted := haltedMachine(t, s)
	start(t, l, halted)
	if err := l.Save(t.Context(), halted.Name, t.TempDir()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("save a machine without a port: got %v, want FailedPrecondition", err)
	}
	destroy(t, l, halted)
}

// replace replaces a file until the test ends, or removes it if content is nil.
func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	before, err := os.ReadFile(path)
	must(t, err)
	must(t, os.Remove(path))
	t.Cleanup(func() { must(t, os.WriteFile(path, before, 0o600)) })
	if content != nil {
		must(t, os.WriteFile(path, content, 0o600))
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestCopyMemory: the copy has the content, and holes instead of pages of zeros.
func TestCopyMemory(t *testing.T) {
	content := make([]byte, 8<<20)
	copy(content[3*memoryPage+7:], "not zero")
	copy(content[len(content)-5:], "end")
	from, err := memoryFile("from", content, 0)
	must(t, err)
	defer from.Close()
	to, err := memoryFile("to", nil, int64(len(content)))
	must(t, err)
	defer to.Close()
	must(t, copyMemory(t.Context(), to, from))
	got := make([]byte, len(content))
	if _, err := to.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the copy differs (error %v)", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(to.Fd()), &st); err != nil || st.Blocks*512 != 2*memoryPage {
		t.Errorf("room of the copy: got %d bytes (error %v), want two pages", st.Blocks*512, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := copyMemory(ctx, to, from); !errors.Is(err, context.Canceled) {
		t.Errorf("copy with a canceled context: got %v", err)
	}
}
