package orchestrator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Kind is what a record is about, as "type" in the messages.
type Kind string

// The kinds.
const (
	Manager Kind = "manager"
	Runtime Kind = "runtime"
	Module  Kind = "module"
)

// kinds are all of them, each with a bucket of its own.
var kinds = []Kind{Manager, Runtime, Module}

// Record describes a manager, a runtime or a module. Records are immutable: a transition replaces them (transition.edit).
type Record struct {
	Kind   Kind      `json:"kind"`
	UUID   string    `json:"uuid"`
	Name   string    `json:"name"`
	Parent string    `json:"parent,omitempty"` // uuid of a runtime's manager or a module's runtime
	Status Status    `json:"status"`
	Since  time.Time `json:"since"` // start of this state
	Number uint64    `json:"number"`
	// Later: its messages have the types of later peers, "req" and "resp".
	Later bool `json:"later,omitempty"`

	// Beats, of managers and runtimes: it has sent a keepalive or promised to, so its silence means that it is dead.
	Beats bool `json:"beats,omitempty"`

	// Of modules.

	// Wanted is the runtime that the client asked for, by uuid; "" where the orchestrator chooses.
	Wanted string `json:"wanted,omitempty"`
	// Choosy: the client asked for APIs; otherwise those in Data are defaults.
	Choosy bool `json:"choosy,omitempty"`
	// Order is the object_id of the last message about it to its manager.
	Order string `json:"order,omitempty"`
	// Untold: that message may not have reached the broker.
	Untold bool `json:"untold,omitempty"`
	// Lost: it is Killed because its runtime was lost as a whole; it may still run there.
	Lost bool `json:"lost,omitempty"`
	// Doomed: it was deleted while its runtime was lost; the runtime gets the order when it is back.
	Doomed    bool       `json:"doomed,omitempty"`
	Restarts  int        `json:"restarts,omitempty"`
	RestartAt *time.Time `json:"restart_at,omitempty"` // the end of the back-off; nil: none
	// Exit is the data of its last exited message, verbatim, without type and uuid.
	Exit json.RawMessage `json:"exit,omitempty"`

	// Data are the fields of its registration or creation, verbatim.
	Data wire.ModuleData `json:"-"`
}

// encode is the stored form: a line of JSON, then Data, verbatim.
func (r *Record) encode() ([]byte, error) {
	head, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("record of %s %s: %w", r.Kind, r.UUID, err)
	}
	return append(append(head, '\n'), r.Data.Bytes()...), nil
}

func decodeRecord(b []byte) (*Record, error) {
	head, data, found := bytes.Cut(b, []byte{'\n'})
	r := &Record{}
	if err := json.Unmarshal(head, r); !found || err != nil {
		return nil, fmt.Errorf("an unreadable record (%v): %w", err, errdefs.ErrDataLoss)
	}
	var err error
	if r.Data, err = wire.ParseModuleData(data); err != nil {
		return nil, fmt.Errorf("record of %s %s: %w (%v)", r.Kind, r.UUID, errdefs.ErrDataLoss, err)
	}
	return r, nil
}

// details is the record in answers and orders: the fields of its registration or creation, and its state.
func (r *Record) details() wire.ModuleData {
	d := maps.Clone(r.Data)
	delete(d, "type")
	set(d, "uuid", r.UUID)
	set(d, "name", r.Name)
	set(d, "status", r.Status)
	if r.Parent != "" {
		set(d, "parent", r.Parent)
	}
	return d
}

// order is the data of a create message to the module's manager.
func (r *Record) order() wire.ModuleData {
	d := r.details()
	set(d, "type", Module)
	set(d, "status", Alive)
	return d
}

// view is the record as REST shows it.
func (r *Record) view() wire.ModuleData {
	d := r.details()
	set(d, "type", r.Kind)
	set(d, "since", r.Since)
	if r.Kind != Module {
		return d
	}
	set(d, "restarts", r.Restarts)
	if r.Untold {
		set(d, "untold", true) // the broker has not acknowledged its order yet
	}
	if r.RestartAt != nil {
		set(d, "restart_at", r.RestartAt)
	}
	if r.Exit != nil {
		d["exit"] = r.Exit
	}
	return d
}

// set sets a field to a value, which must have a JSON form.
func set(d wire.ModuleData, name string, value any) {
	raw, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	d[name] = raw
}

// defaults adds the fields that a message left out, as public peers write them.
func defaults(d wire.ModuleData, with map[string]string) {
	for name, value := range with {
		if raw, ok := d[name]; !ok || len(raw) == 0 {
			d[name] = json.RawMessage(value)
		}
	}
}

var (
	moduleDefaults = map[string]string{
		"filetype": `"WA"`, "apis": `["wasm","wasi"]`, "args": `[]`, "env": `[]`, "channels": `[]`, "peripherals": `[]`,
		"resources": `null`, "fault_crash": `"ignore"`,
	}
	runtimeDefaults = map[string]string{
		"apis": `[]`, "runtime_type": `null`, "max_nmodules": `100`, "page_size": `65536`, "aot_target": `{}`,
		"metadata": `null`, "platform": `null`,
	}
)

// number reads a whole number; ok is false if there is none.
func number(d wire.ModuleData, name string) (n int, ok bool) {
	raw := d[name]
	if len(raw) == 0 || string(raw) == "null" {
		return 0, false
	}
	return n, json.Unmarshal(raw, &n) == nil
}

// text reads a string; "" if there is none.
func text(d wire.ModuleData, name string) string {
	var s string
	if raw := d[name]; len(raw) == 0 || json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// slots is the number of modules that a runtime takes at a time.
func (r *Record) slots() int {
	n, ok := number(r.Data, "max_nmodules")
	if !ok {
		return 0
	}
	return n
}
