package wire

import (
	"strings"

	"github.com/tripod-run/tripod/internal/channel"
)

// Topics names the topics of one realm.
type Topics struct {
	Realm  string
	Nested bool // logs and profiles of modules are below their runtime's uuid, as with later peers
}

func (t Topics) proc(parts ...string) string {
	return t.Realm + "/proc/" + strings.Join(parts, "/")
}

// Reg is for the registration of a manager or runtime, and the answer.
func (t Topics) Reg(uuid string) string { return t.proc("reg", uuid) }

// Control is for clients' requests to the orchestrator.
func (t Topics) Control() string { return t.proc("control") }

// ControlOf is for messages between orchestrator and manager about a runtime's modules.
func (t Topics) ControlOf(runtime string) string { return t.proc("control", runtime) }

// Keepalive is for a runtime's keepalives.
func (t Topics) Keepalive(runtime string) string { return t.proc("keepalive", runtime) }

// RuntimeLog is for a runtime's own log.
func (t Topics) RuntimeLog(runtime string) string { return t.proc("log", runtime) }

// ModuleLog is for a module's log.
func (t Topics) ModuleLog(runtime, module string) string {
	if t.Nested {
		return t.proc("log", runtime, module)
	}
	return t.proc("log", module)
}

// Profile is for a module's profiles of one kind.
func (t Topics) Profile(kind, runtime, module string) string {
	if t.Nested {
		return t.proc("profile", kind, runtime, module)
	}
	return t.proc("profile", kind, module)
}

// Errors is for answers to requests that failed.
func (t Topics) Errors() string { return t.proc("log", "orchestrator") }

// Notif is where the orchestrator announces exits.
func (t Topics) Notif() string { return t.proc("notif") }

// Desired has the retained document of the modules that a runtime is to run.
func (t Topics) Desired(runtime string) string { return t.proc("desired", runtime) }

// Reported has the retained document of the modules that a runtime runs.
func (t Topics) Reported(runtime string) string { return t.proc("reported", runtime) }

// Governs reports whether messages on the topic direct or describe managers and runtimes. A module's message there would count as
// its node's.
func (t Topics) Governs(topic string) bool {
	for _, kind := range []string{"reg", "control", "keepalive", "desired", "reported"} {
		if own := t.proc(kind); topic == own || strings.HasPrefix(topic, own+"/") {
			return true
		}
	}
	return false
}

// Expand is the topic of a module's channel: "$SL/rest" becomes "{realm}/rest/{module}"; any other stays.
func (t Topics) Expand(topic, module string) string {
	rest, local := strings.CutPrefix(topic, channel.Local)
	if !local {
		return topic
	}
	return t.Realm + "/" + rest + "/" + module
}

// Cut returns the levels of a topic below a prefix, as ["a", "b"] for Cut("realm/proc/log/a/b", "realm/proc/log"); nil if the topic
// is not below it.
func Cut(topic, prefix string) []string {
	rest, below := strings.CutPrefix(topic, prefix+"/")
	if !below {
		return nil
	}
	return strings.Split(rest, "/")
}
