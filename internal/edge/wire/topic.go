package wire

import (
	"strings"

	"github.com/tripod-run/tripod/internal/channel"
)

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
	rest, local := strings.CutPrefix(topic, channel.Local)
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
