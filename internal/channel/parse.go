package channel

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
)

// Parse returns the channels in a JSON array. Errors are errdefs.ErrInvalidArgument and name the channel.
func Parse(text string) (channels []Channel, err error) {
	if err := json.Unmarshal([]byte(text), &channels); err != nil {
		return nil, fmt.Errorf("want an array of objects with name, topic and flags: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return channels, Validate(channels)
}
