package qemu

import (
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// growing lets a machine with the memory at boot of d grow.
func growing(d *machine.Definition) {
	d.Growth = &machine.Growth{Boot: d.Memory, Memory: 4 << 30, CPUs: 3}
	d.Cmdline += " memhp_default_state=online memory_hotplug.online_policy=auto-movable"
}

// TestGrow: a machine that continues where a smaller one was saved has the memory of its definition. It gets more memory and
// CPUs while it runs, uses them, and gives memory back: first what it has grown by, then what it has booted with.
func TestGrow(t *testing.T) {
	s := subject(t)
	l := s.Begin(t)
	defer l.Close()
	template := saved(t, s, l, "true", growing)
	d := another(t, s, template)
	d.Memory = template.Memory + 256<<20
	start(t, l, d)
	machinetest.AwaitMachines(t, d, 1)
	console := machinetest.Attach(t, d)
	defer console.Close()
	for _, memory := range []uint64{d.Memory, d.Memory + 512<<20 + 1, template.Memory, template.Memory - 16<<20, d.Memory} {
		if err := l.SetMemory(t.Context(), d.Name, memory); err != nil {
			t.Fatalf("%d bytes: %v", memory, err)
		}
		want := memory
		if memory > template.Memory { // it grows by whole units
			want = template.Memory + (memory-template.Memory+machine.GrowthUnit-1)/machine.GrowthUnit*machine.GrowthUnit
		}
		if figures, err := l.Stats(t.Context(), d.Name); err != nil || figures.Memory != want {
			t.Errorf("%d bytes: the guest has %d (error %v), want %d", memory, figures.Memory, err, want)
		}
	}
	console.Type(`dd if=/dev/zero of=/dev/null bs=200M count=1 && echo us""ed`)
	machinetest.AwaitLog(t, d, "used", 1)
	for _, cpus := range []int{1, 2, 2} {
		if err := l.AddCPUs(t.Context(), d.Name, cpus); err != nil {
			t.Fatalf("%d CPUs: %v", cpus, err)
		}
	}
	console.Type(`until [ -e /sys/devices/system/cpu/cpu1/online ]; do sleep 0.1; done; echo 1 >/sys/devices/system/cpu/cpu1/online; echo CP""Us $(nproc)`)
	machinetest.AwaitLog(t, d, "CPUs 2", 1)
	if err := l.AddCPUs(t.Context(), d.Name, 4); !errdefs.IsNotImplemented(err) {
		t.Errorf("more CPUs than the machine can have: got %v, want NotImplemented", err)
	}
	destroy(t, l, d)
}

// TestGrowRefused: a machine that was started without Growth gets no CPUs, nor an emulated one with several, which QEMU would
// not survive. A machine that has grown is not saved.
func TestGrowRefused(t *testing.T) {
	s := subject(t)
	l := s.Begin(t)
	defer l.Close()
	for name, change := range map[string]func(*machine.Definition){
		"no growth":    func(*machine.Definition) {},
		"several CPUs": func(d *machine.Definition) { growing(d); d.CPUs = 2 },
		"it has grown": func(d *machine.Definition) { growing(d); d.Memory += 64 << 20; d.CPUs = 2 },
	} {
		d := s.Definition(t)
		d.Plug = true
		change(&d)
		start(t, l, d)
		if err := l.AddCPUs(t.Context(), d.Name, 3); !errdefs.IsNotImplemented(err) {
			t.Errorf("%s: add CPUs: got %v, want NotImplemented", name, err)
		}
		if name == "it has grown" {
			if err := l.Save(t.Context(), d.Name, t.TempDir()); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("%s: save: got %v, want FailedPrecondition", name, err)
			}
		}
		destroy(t, l, d)
	}
	for name, g := range map[string]machine.Growth{
		"no memory at boot": {Memory: 1 << 30, CPUs: 1}, "no room": {Boot: 128 << 20, Memory: 128 << 20, CPUs: 1},
		"fewer CPUs":   {Boot: 64 << 20, Memory: 1 << 30},
		"more at boot": {Boot: 256 << 20, Memory: 1 << 30, CPUs: 1}, "too many CPUs": {Boot: 64 << 20, Memory: 1 << 30, CPUs: 1000},
	} {
		d := s.Definition(t)
		d.Plug, d.Growth = true, &g
		if err := l.Define(t.Context(), d); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: got %v, want InvalidArgument", name, err)
		}
	}
}
