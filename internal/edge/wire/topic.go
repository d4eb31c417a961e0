package wire

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

// Topics names the topics of one realm (Seed 4, "Messaging"; the later peers' names where Nested).
type Topics struct {
	Realm  string
	Nested bool // logs and profiles of modules below the name of their runtime
}

func (t Topics) proc(parts ...string) string {
	return t.Realm + "/proc/" + strings.Join(parts, "/")
}

// Reg is where a manager or runtime registers, and the answer comes.
func (t Topics) Reg(uuid string) string { return t.proc("reg", uuid) }

// Control is where clients ask the orchestrator.
func (t Topics) Control() string { return t.proc("control") }

// ControlOf is where orchestrator and manager speak of a runtime's modules.
func (t Topics) ControlOf(runtime string) string { return t.proc("control", runtime) }

// Keepalive is where a runtime's state is told.
func (t Topics) Keepalive(runtime string) string { return t.proc("keepalive", runtime) }

// RuntimeLog is where a runtime's own log goes.
func (t Topics) RuntimeLog(runtime string) string { return t.proc("log", runtime) }

// ModuleLog is where a module's log goes.
func (t Topics) ModuleLog(runtime, module string) string {
	if t.Nested {
		return t.proc("log", runtime, module)
	}
	return t.proc("log", module)
}

// Profile is where a module's profiles of one kind go.
func (t Topics) Profile(kind, runtime, module string) string {
	if t.Nested {
		return t.proc("profile", kind, runtime, module)
	}
	return t.proc("profile", kind, module)
}

// Errors is where the orchestrator answers what it could not do.
func (t Topics) Errors() string { return t.proc("log", "orchestrator") }

// Notif is where the orchestrator tells everybody of exits, as the public one does.
func (t Topics) Notif() string { return t.proc("notif") }

// Desired is the retained document of the modules that a runtime is to run.
func (t Topics) Desired(runtime string) string { return t.proc("desired", runtime) }

// Reported is the retained document of the modules that a runtime runs.
func (t Topics) Reported(runtime string) string { return t.proc("reported", runtime) }

// Governs tells whether messages on the topic direct or describe managers and runtimes: what a module says there would count as
// said by its node.
func (t Topics) Governs(topic string) bool {
	for _, kind := range []string{"reg", "control", "keepalive", "desired", "reported"} {
		if own := t.proc(kind); topic == own || strings.HasPrefix(topic, own+"/") {
			return true
		}
	}
	return false
}

// Expand is the topic of a module's channel: "$SL/rest" becomes "{realm}/rest/{module}", any other stays as it is.
func (t Topics) Expand(topic, module string) string {
	rest, local := strings.CutPrefix(topic, Local)
	if !local {
		return topic
	}
	return t.Realm + "/" + rest + "/" + module
}

// Cut is the part of a topic after a prefix that it names with its levels, as Cut("realm/proc/log/a/b", "realm/proc/log") is
// ["a", "b"]; nil if the topic is not below it.
func Cut(topic, prefix string) []string {
	rest, below := strings.CutPrefix(topic, prefix+"/")
	if !below {
		return nil
	}
	return strings.Split(rest, "/")
}

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

// Match tells whether a message on the topic is for the filter. A wildcard in the first level does not match topics that begin
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
