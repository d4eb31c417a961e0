package orchestrator

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// ending describes the end of a module, as reported by the module's manager.
type ending struct {
	raw    json.RawMessage // the data without type and uuid
	failed bool
	lost   bool // the runtime was lost; the module did not fail
}

// Reasons in "status".
const (
	reasonExited = "exited"
	reasonLost   = "runtime-lost"
)

// readExit parses {"status": {"code", "reason", …}}, or {"status": "exited", "exit_code": 3} from foreign runtimes.
func readExit(d wire.ModuleData) ending {
	e := ending{raw: d.Without("type", "uuid").Bytes()}
	var status struct {
		Code   int    `json:"code"`
		Reason string `json:"reason"`
	}
	if raw := d["status"]; len(raw) > 0 && json.Unmarshal(raw, &status) == nil {
		e.lost = status.Reason == reasonLost
		e.failed = status.Code != 0 || status.Reason != "" && status.Reason != reasonExited
	} else if s := d.Text("status"); s != "" && s != reasonExited {
		e.failed = true
	}
	if code, ok := number(d, "exit_code"); ok && code != 0 {
		e.failed = true
	}
	return e
}

// Values of "fault_crash" that mean the same as the policy on-failure; "ignore" is the default.
var crashRestarts = []string{"restart", "recreate"}

// restarts reports whether a module with this end is created again. The module's field "restart" decides or, if that
// field is missing, the field "fault_crash".
func (e ending) restarts(d wire.ModuleData) bool {
	switch {
	case d.Text("restart") == "":
		return e.failed && slices.Contains(crashRestarts, d.FaultCrash())
	case d.Restart() == wire.RestartAlways:
		return true
	}
	return e.failed && d.Restart() == wire.RestartOnFailure
}

// backOff sets the time at which a killed module is created again. The delay doubles with each restart. A run of at
// least RestartReset resets the delay.
func (t *transition) backOff(m *Record, ranFor time.Duration) {
	c := t.o.config
	if ranFor >= c.RestartReset {
		m.Restarts = 0
	}
	delay := c.RestartMax
	if m.Restarts < 31 && c.RestartMin<<m.Restarts < c.RestartMax {
		delay = c.RestartMin << m.Restarts
	}
	m.Restarts++
	at := t.now.Add(delay)
	m.RestartAt = &at
}
