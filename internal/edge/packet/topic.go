package packet

import (
	"strings"

	"github.com/tripod-run/tripod/internal/channel"
)

// SharePrefix begins the filters of shared subscriptions (MQTT 5.0 §4.8.2).
const SharePrefix = "$share/"

// ValidTopic reports whether a topic name is one that a message can have (MQTT 5.0 §4.7).
func ValidTopic(topic string) bool { return channel.ValidTopic(topic) == nil }

// ValidFilter reports whether a topic filter is valid, also one of a shared subscription (MQTT 5.0 §4.7.1, §4.8.2).
func ValidFilter(filter string) bool {
	group, rest, shared := Shared(filter)
	if shared && (group == "" || channel.HasWildcard(group) || channel.ValidFilter(group) != nil) {
		return false
	}
	return channel.ValidFilter(rest) == nil
}

// Shared splits the filter of a shared subscription into the group's name and the filter for topics. For another filter
// it returns false, and the filter unchanged.
func Shared(filter string) (group, rest string, shared bool) {
	after, shared := strings.CutPrefix(filter, SharePrefix)
	if !shared {
		return "", filter, false
	}
	group, rest, _ = strings.Cut(after, "/")
	return group, rest, true
}
