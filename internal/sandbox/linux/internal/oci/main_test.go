package oci

import (
	"os"
	"testing"

	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
)

// TestMain runs the tests as root in their own namespaces, because they mount programs and create cgroups.
func TestMain(m *testing.M) {
	testns.Reenter()
	if !testns.Inside() {
		os.Exit(testns.Run(append([]string{"/proc/self/exe"}, os.Args[1:]...), testns.Options{Strict: true}))
	}
	os.Exit(races.Run(m.Run))
}
