package kube

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

var shared struct {
	once sync.Once
	*Cluster
	err   error
	nodes int
}

// Main is the TestMain of a package whose tests share a cluster with the given number of nodes. It fails if the cluster
// does not stop properly or leaves anything behind.
func Main(m *testing.M, nodes int) {
	harness.Enter(func() int {
		shared.nodes = nodes
		code := m.Run()
		if shared.Cluster == nil {
			return code
		}
		if err := errors.Join(shared.Drain(), shared.stopPrograms(), shared.Leaks(), shared.end()); err != nil {
			fmt.Fprintf(os.Stderr, "the cluster did not stop properly, or left something behind:\n%v\n", err)
			return max(code, 1)
		}
		return code
	})
}

// Shared returns the tests' cluster. The first call starts it.
func Shared(t testing.TB) *Cluster {
	t.Helper()
	shared.once.Do(func() { shared.Cluster, shared.err = Start(shared.nodes) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.Cluster
}
