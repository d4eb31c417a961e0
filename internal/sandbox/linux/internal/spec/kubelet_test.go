package spec

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/sandboxtest/corpus"
)

// TestWhatAKubeletSends: every request in the corpus passes on the kubelet's host.
func TestWhatAKubeletSends(t *testing.T) {
	for _, p := range corpus.Pods(t) {
		host := fullHost()
		host.CgroupV2 = len(p.Container.GetLinux().GetResources().GetUnified()) > 0
		pod := &sandbox.Pod{ID: "0123456789abcdef", Config: p.Sandbox}
		assert.NoError(t, Validate(pod, &sandbox.Container{ID: "fedcba9876543210", Config: p.Container}, host), p.Name)
		p = p.InUserNamespace()
		assert.NoError(t, Validate(pod, nil, host), p.Name)
		assert.NoError(t, Validate(pod, &sandbox.Container{ID: "fedcba9876543210", Config: p.Container}, host), p.Name)
	}
}
