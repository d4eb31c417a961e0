package sandbox

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
)

const (
	// AnnotationEdge begins the annotations that only the edge front door sets: over the CRI they are refused.
	AnnotationEdge = "tripod.dev/edge."
	// AnnotationRuntime is a pod's annotation with the uuid of the runtime whose module it runs.
	AnnotationRuntime = AnnotationEdge + "runtime"
	// AnnotationChannels is a container's annotation with its channels, a JSON array of channel.Channel.
	AnnotationChannels = AnnotationEdge + "channels"
)

// ParseChannels reads the channels from a container's annotations; there may be none. Errors are
// errdefs.ErrInvalidArgument and name the channel.
func ParseChannels(annotations map[string]string) ([]channel.Channel, error) {
	raw, ok := annotations[AnnotationChannels]
	if !ok {
		return nil, nil
	}
	var channels []channel.Channel
	err := json.Unmarshal([]byte(raw), &channels)
	if err != nil {
		err = fmt.Errorf("want an array of objects with name, topic and flags: %w: %w", err, errdefs.ErrInvalidArgument)
	} else {
		err = channel.Validate(channels)
	}
	if err != nil {
		return nil, fmt.Errorf("annotation %s: %w", AnnotationChannels, err)
	}
	return channels, nil
}
