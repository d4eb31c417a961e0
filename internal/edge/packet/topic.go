package packet

import (
	"strings"
	"unicode/utf8"
)

// SharePrefix begins the filters of shared subscriptions (MQTT 5.0 §4.8.2).
const SharePrefix = "$share/"

const maxText = 65_535 // bytes in a string (MQTT 5.0 §1.5.4)

// ValidTopic reports whether a topic name is one that a message can have (MQTT 5.0 §4.7).
func ValidTopic(topic string) bool {
	return topic != "" && len(topic) <= maxText && !strings.ContainsAny(topic, "+#\x00") && utf8.ValidString(topic)
}

// ValidFilter reports whether a topic filter is valid, also one of a shared subscription (MQTT 5.0 §4.7.1, §4.8.2).
func ValidFilter(filter string) bool {
	if len(filter) > maxText || !utf8.ValidString(filter) || strings.IndexByte(filter, 0) >= 0 {
		return false
	}
	group, filter, shared := Shared(filter)
	if shared && (group == "" || strings.ContainsAny(group, "+#")) || filter == "" {
		return false
	}
	for rest, more := filter, true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		if len(level) > 1 && strings.ContainsAny(level, "+#") || level == "#" && more {
			return false
		}
	}
	return true
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
