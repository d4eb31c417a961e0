package wire

import (
	"strings"

	"github.com/tripod-run/tripod/internal/channel"
)

// Topics names the topics of one realm.
type Topics struct {
	Realm  string
	Nested bool // topics of modules' logs and profiles contain the runtime's uuid, as for later peers
}

func (t Topics) proc(parts ...string) string {
	return t.Realm + "/proc/" + strings.Join(parts, "/")
}

// Reg returns the topic of the registration of a manager or runtime, and of the answer to it.
func (t Topics) Reg(uuid string) string { return t.proc("reg", uuid) }

// Control returns the topic of clients' requests to the orchestrator.
func (t Topics) Control() string { return t.proc("control") }

// ControlOf returns the topic of messages between the orchestrator and a manager about a runtime's modules.
func (t Topics) ControlOf(runtime string) string { return t.proc("control", runtime) }

// Keepalive returns the topic of a runtime's keepalives.
func (t Topics) Keepalive(runtime string) string { return t.proc("keepalive", runtime) }

// RuntimeLog returns the topic of a runtime's own log.
func (t Topics) RuntimeLog(runtime string) string { return t.proc("log", runtime) }

// ModuleLog returns the topic of a module's log.
func (t Topics) ModuleLog(runtime, module string) string {
	if t.Nested {
		return t.proc("log", runtime, module)
	}
	return t.proc("log", module)
}

// LogRequest returns the topic of requests to a manager for the log of a module. It is below that of orders, which
// managers subscribe to and orchestrators do not.
func (t Topics) LogRequest(runtime string) string { return t.ControlOf(runtime) + "/log" }

// KeptLog returns the topic of a manager's answers to requests for a module's log.
func (t Topics) KeptLog(runtime, module string) string { return t.ModuleLog(runtime, module) + "/kept" }

// Profile returns the topic of a module's profiles of one kind.
func (t Topics) Profile(kind, runtime, module string) string {
	if t.Nested {
		return t.proc("profile", kind, runtime, module)
	}
	return t.proc("profile", kind, module)
}

// Errors returns the topic of answers to failed requests.
func (t Topics) Errors() string { return t.proc("log", "orchestrator") }

// Notif returns the topic on which the orchestrator publishes exits.
func (t Topics) Notif() string { return t.proc("notif") }

// Desired returns the topic of the retained document with the modules that a runtime should run.
func (t Topics) Desired(runtime string) string { return t.proc("desired", runtime) }

// Reported returns the topic of the retained document with the modules that a runtime runs.
func (t Topics) Reported(runtime string) string { return t.proc("reported", runtime) }

// Governs reports whether messages on the topic control or describe managers and runtimes. Peers would take a module's
// message on such a topic for a message from the module's node.
func (t Topics) Governs(topic string) bool {
	for _, kind := range []string{"reg", "control", "keepalive", "desired", "reported"} {
		if own := t.proc(kind); topic == own || strings.HasPrefix(topic, own+"/") {
			return true
		}
	}
	_, scene := t.ParseScene(topic)
	return scene
}

// Expand returns the topic of a module's channel: "$SL/rest" becomes "{realm}/rest/{module}"; other topics do not
// change.
func (t Topics) Expand(topic, module string) string {
	rest, local := strings.CutPrefix(topic, channel.Local)
	if !local {
		return topic
	}
	return t.Realm + "/" + rest + "/" + module
}

// Cut returns the levels of a topic below a prefix, for example ["a", "b"] for Cut("realm/proc/log/a/b",
// "realm/proc/log"). It returns nil if the topic is not below the prefix.
func Cut(topic, prefix string) []string {
	rest, below := strings.CutPrefix(topic, prefix+"/")
	if !below {
		return nil
	}
	return strings.Split(rest, "/")
}
