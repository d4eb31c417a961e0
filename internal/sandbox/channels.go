package sandbox

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/keys"
)

// ParseChannels returns the channels in a container's annotations, possibly none. Errors are errdefs.ErrInvalidArgument
// and name the channel.
func ParseChannels(annotations map[string]string) ([]channel.Channel, error) {
	raw, ok := annotations[keys.EdgeChannels]
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
		return nil, fmt.Errorf("annotation %s: %w", keys.EdgeChannels, err)
	}
	return channels, nil
}
