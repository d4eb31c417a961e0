package linux

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestCreateSpecified checks that a container is made as a plugin has adjusted it, that a plugin is asked once for each container,
// and that one which it has refused leaves nothing behind.
func TestCreateSpecified(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	c := &sandbox.Container{ID: newID(), Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: busybox}, Command: []string{"asked"},
	}, ImageID: busybox}
	adjusted, asked := *c, 0
	adjusted.Config = &runtimeapi.ContainerConfig{Metadata: c.Config.Metadata, Image: c.Config.Image, Command: []string{"adjusted"}}
	create := func(refuse error) error {
		_, err := r.CreateSpecified(t.Context(), p.Pod, c, func(_ context.Context, config *specs.Spec) (*sandbox.Container, error) {
			asked++
			require.Equal(t, []string{"asked"}, config.Process.Args)
			return &adjusted, refuse
		})
		return err
	}
	no := errors.New("no")
	require.ErrorIs(t, create(no), no)
	_, err := r.Spec(p.Pod, c)
	require.Error(t, err, "a refused container has no specification")
	for range 2 {
		require.NoError(t, create(nil))
		config, err := r.Spec(p.Pod, c)
		require.NoError(t, err)
		require.True(t, slices.Contains(config.Process.Args, "adjusted"), "args: %q", config.Process.Args)
	}
	require.Equal(t, 2, asked)
	require.NoError(t, r.RemoveContainer(t.Context(), p.Pod, c))
}
