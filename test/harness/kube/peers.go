package kube

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/tripod-run/tripod/test/harness"
)

// Peers returns the path of the program hack/kube/peers, which it builds first.
var Peers = sync.OnceValues(func() (string, error) {
	program := filepath.Join(harness.Root(), "build/bin/kubepeers")
	// With the options of hack/kube.sh, most packages are in the build cache.
	build := exec.Command("go", "build", "-C", filepath.Join(harness.Root(), "hack/kube"), "-trimpath", "-o", program, "./peers")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", build, err, out)
	}
	return program, nil
})
