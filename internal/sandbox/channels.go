package sandbox

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
)

const (
	// AnnotationEdge begins the annotations that only the edge front door sets: over the CRI they are refused.
	AnnotationEdge = "tripod.dev/edge."
	// AnnotationRuntime is a pod's annotation with the uuid of the runtime whose module it runs.
	AnnotationRuntime = AnnotationEdge + "runtime"
	// AnnotationChannels is a container's annotation with its channels, a JSON array of Channel.
	AnnotationChannels = AnnotationEdge + "channels"
)

const (
	// MaxChannels is how many channels a container may have (edge protocol: one byte).
	MaxChannels = 256
	// maxChannelName and maxTopic are bytes; the latter is MQTT's limit of a string.
	maxChannelName = 255
	maxTopic       = 65535
)

// The bits of Channel.Flags (edge protocol, Open Channel).
const (
	ChannelRead  = 1
	ChannelWrite = 2
	ChannelQoS1  = 4
	ChannelQoS2  = 8
)

// Channel is a channel that a container may open under a name.
type Channel struct {
	// Name is the file name in the container's /ch; "stdin", "stdout" and "stderr" stand for these streams.
	Name string `json:"name"`
	// Topic is the MQTT topic or, of a channel that is only read, the filter.
	Topic string `json:"topic"`
	// Flags say what the channel is opened for.
	Flags uint8 `json:"flags"`
}

// ParseChannels reads the channels from a container's annotations; there may be none. Errors are
// errdefs.ErrInvalidArgument and name the channel.
func ParseChannels(annotations map[string]string) ([]Channel, error) {
	raw, ok := annotations[AnnotationChannels]
	if !ok {
		return nil, nil
	}
	var channels []Channel
	if err := json.Unmarshal([]byte(raw), &channels); err != nil {
		return nil, badChannels("%v; an array of objects with name, topic and flags is wanted", err)
	}
	if len(channels) > MaxChannels {
		return nil, badChannels("%d channels, a container may have %d", len(channels), MaxChannels)
	}
	seen := map[string]bool{}
	for i, c := range channels {
		if seen[c.Name] {
			return nil, badChannels("two channels have the name %q", c.Name)
		}
		seen[c.Name] = true
		if why := c.wrong(); why != "" {
			return nil, badChannels("channel %d (%q): %s", i, c.Name, why)
		}
	}
	return channels, nil
}

func badChannels(format string, args ...any) error {
	return fmt.Errorf("annotation %s: %s: %w", AnnotationChannels, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// wrong says what is wrong with a channel, "" for nothing.
func (c Channel) wrong() string {
	switch {
	case c.Name == "" || c.Name == "." || c.Name == ".." || len(c.Name) > maxChannelName,
		strings.ContainsFunc(c.Name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }):
		return "the name is not a file name"
	case c.Topic == "" || len(c.Topic) > maxTopic || strings.ContainsRune(c.Topic, 0):
		return "the topic is empty, too long or has a NUL byte"
	case c.Flags&(ChannelRead|ChannelWrite) == 0:
		return fmt.Sprintf("flags %d open it neither for reading (1) nor for writing (2)", c.Flags)
	case c.Flags > ChannelRead|ChannelWrite|ChannelQoS1|ChannelQoS2:
		return fmt.Sprintf("flags %d have bits that nobody knows", c.Flags)
	case c.Flags&ChannelWrite != 0 && strings.ContainsAny(c.Topic, "+#"):
		return fmt.Sprintf("the topic %q has a wildcard, which only a channel that is read and not written may have", c.Topic)
	}
	return ""
}
