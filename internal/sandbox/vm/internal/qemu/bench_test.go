package qemu

import (
	"path/filepath"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// BenchmarkLife measures the same calls as the benchmark of the driver libvirt.
func BenchmarkLife(b *testing.B) {
	machinetest.BenchmarkLife(b, machinetest.Subject{
		New: driverOver(filepath.Join(b.TempDir(), "qemu")), Guest: machinetest.FindGuest(b, false),
		NewCgroup: machinetest.NewCgroup, UID: 200001, GID: 200002,
	})
}
