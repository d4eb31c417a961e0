package blockdev

import "testing"

// TestPhysicalBlock checks that QEMU accepts the size of physical sectors, whatever a device reports.
func TestPhysicalBlock(t *testing.T) {
	for _, test := range []struct{ logical, physical, want int }{
		{512, 512, 512}, {512, 4096, 4096}, {4096, 4096, 4096}, {4096, 512, 4096}, {512, 98304, 512}, {512, 4 << 20, 512}, {512, 0, 512},
	} {
		if got := physicalBlock(test.logical, test.physical); got != test.want {
			t.Errorf("physicalBlock(%d, %d) = %d, want %d", test.logical, test.physical, got, test.want)
		}
	}
}
