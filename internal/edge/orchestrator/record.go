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

// Kind is the kind of a record, and the "type" in messages.
type Kind string

// The kinds.
const (
	Manager Kind = "manager"
	Runtime Kind = "runtime"
	Module  Kind = "module"
)

// kinds lists all kinds. Each kind has its own bucket.
var kinds = []Kind{Manager, Runtime, Module}

// Record describes a manager, a runtime or a module. Records are immutable: a transition replaces them
// (transition.edit).
type Record struct {
	Kind   Kind      `json:"kind"`
	UUID   string    `json:"uuid"`
	Name   string    `json:"name"`
	Parent string    `json:"parent,omitempty"` // uuid of a runtime's manager or a module's runtime
	Status Status    `json:"status"`
	Since  time.Time `json:"since"` // start of this state
	Number uint64    `json:"number"`
	// Dialect is that of messages to the peer, or to the client that created the module.
	Dialect

	// Beats is set if silence means that the manager or runtime is dead. That is the case for peers that have sent or
	// promised a keepalive, and for runtimes without a manager.
	Beats bool `json:"beats,omitempty"`

	// The remaining fields except Data are set for modules only.

	// Wanted is the uuid of the runtime that the client asked for; "" if the orchestrator chooses.
	Wanted string `json:"wanted,omitempty"`
	// WantsAPIs is set if the client asked for APIs. Otherwise the APIs in Data are defaults.
	WantsAPIs bool `json:"choosy,omitempty"`
	// Order is the object_id of the last order that a manager was sent about the module.
	Order string `json:"order,omitempty"`
	// Unconfirmed is set while that order may not have reached the broker.
	Unconfirmed bool `json:"untold,omitempty"`
	// Direct is set if the module's runtime got the request of a scene-scoped client, which it therefore answers itself.
	Direct bool `json:"direct,omitempty"`
	// Asked is the object_id of a scene-scoped client's request to delete the module.
	Asked string `json:"asked,omitempty"`
	// Lost is set if the module is Killed because its runtime was lost. The module may still run on that runtime.
	Lost bool `json:"lost,omitempty"`
	// Doomed is set if the module was deleted while its runtime was lost. The runtime gets the delete order when it
	// registers again.
	Doomed    bool       `json:"doomed,omitempty"`
	Restarts  int        `json:"restarts,omitempty"`
	RestartAt *time.Time `json:"restart_at,omitempty"` // end of the back-off; nil if there is none
	// Exit is the data of the module's last exited message, without type and uuid. The other fields are verbatim.
	Exit json.RawMessage `json:"exit,omitempty"`

	// Data has the fields of the registration or creation, verbatim.
	Data wire.ModuleData `json:"-"`
}

// encode returns the stored form: a line of JSON, then Data, verbatim.
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
		return nil, fmt.Errorf("unreadable record (%v): %w", err, errdefs.ErrDataLoss)
	}
	var err error
	if r.Data, err = wire.ParseModuleData(data); err != nil {
		return nil, fmt.Errorf("record of %s %s: %w (%v)", r.Kind, r.UUID, errdefs.ErrDataLoss, err)
	}
	return r, nil
}

// details returns the record for answers and orders. It has the fields of the registration or creation, and the state.
func (r *Record) details() wire.ModuleData {
	d := maps.Clone(r.Data)
	delete(d, "type")
	d.Set("uuid", r.UUID)
	d.Set("name", r.Name)
	d.Set("status", r.Status)
	if r.Parent != "" {
		d.Set("parent", r.Parent)
	}
	return d
}

// order returns the data of a create message to the module's manager.
func (r *Record) order() wire.ModuleData {
	d := r.details()
	d.Set("type", Module)
	d.Set("status", Alive)
	return d
}

// view returns the record for REST.
func (r *Record) view() wire.ModuleData {
	d := r.details()
	d.Set("type", r.Kind)
	d.Set("since", r.Since)
	if r.Kind != Module {
		return d
	}
	d.Set("restarts", r.Restarts)
	if r.Unconfirmed {
		d.Set("untold", true) // the broker has not acknowledged the module's last order yet
	}
	if r.RestartAt != nil {
		d.Set("restart_at", r.RestartAt)
	}
	if r.Exit != nil {
		d["exit"] = r.Exit
	}
	return d
}

// defaults adds the missing fields, with the values that public peers send.
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

// number returns the integer in a field. It reports false if the field is missing or not an integer.
func number(d wire.ModuleData, name string) (n int, ok bool) {
	raw := d[name]
	if len(raw) == 0 || string(raw) == "null" {
		return 0, false
	}
	return n, json.Unmarshal(raw, &n) == nil
}

// slots returns the maximum number of modules of a runtime.
func (r *Record) slots() int {
	n, _ := number(r.Data, "max_nmodules")
	return n
}
