package edgetest

import "strings"

// Match reports whether a message on the topic is for the filter. A wildcard in the first level does not match topics that begin
// with $ (MQTT 5.0 §4.7.2).
func Match(filter, topic string) bool {
	if strings.HasPrefix(topic, "$") && (strings.HasPrefix(filter, "+") || strings.HasPrefix(filter, "#")) {
		return false
	}
	for {
		if filter == "#" {
			return true
		}
		var want, have string
		var wants, has bool
		want, filter, wants = strings.Cut(filter, "/")
		have, topic, has = strings.Cut(topic, "/")
		switch {
		case want != "+" && want != have:
			return false
		case !has && wants && filter == "#": // "a/#" is for "a" too
			return true
		case wants != has:
			return false
		case !has:
			return true
		}
	}
}
