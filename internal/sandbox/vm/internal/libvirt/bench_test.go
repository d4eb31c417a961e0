package libvirt

import (
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

// BenchmarkLife measures the same calls as the benchmark of the driver qmp.
func BenchmarkLife(b *testing.B) { machinetest.BenchmarkLife(b, newRig(b).subject(b)) }
