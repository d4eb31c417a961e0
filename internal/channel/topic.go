package channel

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
)

// Local is the prefix of a module's own topics. The front door expands the prefix (wire.Topics.Expand) before it opens
// a channel.
const Local = "$SL/"

// maxTopic is the maximum length of a topic, in bytes (MQTT 5.0 §4.7.3).
const maxTopic = 65535

// HasWildcard reports whether a filter matches more than one topic.
func HasWildcard(filter string) bool { return strings.ContainsAny(filter, "+#") }

// ValidTopic checks that messages can be published to the topic (MQTT 5.0 §4.7). The error is
// errdefs.ErrInvalidArgument.
func ValidTopic(topic string) error {
	if HasWildcard(topic) {
		return fmt.Errorf("the topic %q has a wildcard, which only subscriptions can have: %w", topic, errdefs.ErrInvalidArgument)
	}
	return ValidFilter(topic)
}

// ValidFilter checks that clients can subscribe to the filter (MQTT 5.0 §4.7). The error is errdefs.ErrInvalidArgument.
func ValidFilter(filter string) error {
	switch {
	case filter == "":
		return fmt.Errorf("the topic is empty: %w", errdefs.ErrInvalidArgument)
	case len(filter) > maxTopic:
		return fmt.Errorf("topic of %d bytes: the limit is %d: %w", len(filter), maxTopic, errdefs.ErrInvalidArgument)
	case !utf8.ValidString(filter) || strings.ContainsRune(filter, 0):
		return fmt.Errorf("the topic %q is not UTF-8 without NUL: %w", filter, errdefs.ErrInvalidArgument)
	}
	for rest, more := filter, true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		switch {
		case len(level) > 1 && HasWildcard(level):
			return fmt.Errorf("the topic %q: a wildcard must be a whole level: %w", filter, errdefs.ErrInvalidArgument)
		case level == "#" && more:
			return fmt.Errorf("the topic %q: # must be the last level: %w", filter, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// Covers reports whether the wide filter matches every topic that the other filter matches. A topic is a filter that
// matches only itself, so Covers(filter, topic) reports whether the filter matches the topic. Wildcards in the first
// level do not match topics that begin with $ (MQTT 5.0 §4.7.2). For a few pairs of filters, such as +/# and #, Covers
// wrongly returns false, which is harmless.
func Covers(wide, other string) bool {
	if strings.HasPrefix(other, "$") && (strings.HasPrefix(wide, "+") || strings.HasPrefix(wide, "#")) {
		return false
	}
	for {
		if wide == "#" {
			return true
		}
		var w, o string
		var moreW, moreO bool
		w, wide, moreW = strings.Cut(wide, "/")
		o, other, moreO = strings.Cut(other, "/")
		switch {
		case o == "#", w != "+" && w != o:
			return false
		case !moreO:
			return !moreW || wide == "#"
		case !moreW:
			return false
		}
	}
}
