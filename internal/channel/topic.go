package channel

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
)

// Local is what begins a module's own topic: Topics.Expand.
const Local = "$SL/"

// maxTopic is the length of a topic in bytes (MQTT 5.0 §4.7.3).
const maxTopic = 65535

// HasWildcard tells whether a filter names more than one topic.
func HasWildcard(filter string) bool { return strings.ContainsAny(filter, "+#") }

// ValidTopic tells why nothing can be published to the topic, as ErrInvalidArgument (MQTT 5.0 §4.7).
func ValidTopic(topic string) error {
	if HasWildcard(topic) {
		return fmt.Errorf("the topic %q: a wildcard names no topic to publish to: %w", topic, errdefs.ErrInvalidArgument)
	}
	return ValidFilter(topic)
}

// ValidFilter tells why the filter cannot be subscribed to, as ErrInvalidArgument (MQTT 5.0 §4.7).
func ValidFilter(filter string) error {
	switch {
	case filter == "":
		return fmt.Errorf("the topic is empty: %w", errdefs.ErrInvalidArgument)
	case len(filter) > maxTopic:
		return fmt.Errorf("a topic of %d bytes: at most %d are possible: %w", len(filter), maxTopic, errdefs.ErrInvalidArgument)
	case !utf8.ValidString(filter) || strings.ContainsRune(filter, 0):
		return fmt.Errorf("the topic %q: it must be UTF-8 without NUL: %w", filter, errdefs.ErrInvalidArgument)
	}
	for rest, more := filter, true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		switch {
		case len(level) > 1 && HasWildcard(level):
			return fmt.Errorf("the topic %q: a wildcard takes a whole level: %w", filter, errdefs.ErrInvalidArgument)
		case level == "#" && more:
			return fmt.Errorf("the topic %q: # is the last level: %w", filter, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}
