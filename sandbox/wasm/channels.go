package wasm

import (
	"context"
	"net"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/wasm/control"
	"github.com/tripod-run/tripod/sandbox"
)

// Channels implements sandbox.Channeler. The group is the worker: it delivers by itself among its pods.
func (b *Backend) Channels(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container) (net.Conn, string, error) {
	_, l, err := b.running(c.ID)
	if err != nil {
		return nil, "", err
	}
	conn, err := l.worker.conn().Channels(ctx, c.ID)
	if err != nil {
		return nil, "", gone(err, c.ID)
	}
	return conn, l.worker.name, nil
}

// channelsOf are the channels of a container as the worker is told of them.
func channelsOf(config *runtimeapi.ContainerConfig) ([]control.Channel, error) {
	parsed, err := sandbox.ParseChannels(config.GetAnnotations())
	channels := make([]control.Channel, 0, len(parsed))
	for _, c := range parsed {
		channels = append(channels, control.Channel{Name: c.Name, Topic: c.Topic, Flags: c.Flags})
	}
	return channels, err
}
