package sandbox

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
)

const (
	// AnnotationEdge is the prefix of annotations that only the edge front door sets. CRI requests that have such
	// annotations are refused.
	AnnotationEdge = "tripod.dev/edge."
	// AnnotationRuntime is a pod annotation with the UUID of the runtime whose module the pod runs.
	AnnotationRuntime = AnnotationEdge + "runtime"
	// AnnotationChannels is a container annotation with the container's channels, as a JSON array of channel.Channel.
	AnnotationChannels = AnnotationEdge + "channels"
)

// ParseChannels returns the channels in a container's annotations, possibly none. Errors are errdefs.ErrInvalidArgument
// and name the channel.
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
