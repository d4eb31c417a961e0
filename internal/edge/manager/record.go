package manager

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/node/store"
)

// Kinds of records in the store.
const (
	kindModule  = "module"  // record, by uuid
	kindDesired = "desired" // the document verbatim, by the runtime's uuid
	kindDialect = "dialect" // the type of the orchestrator's requests, by keyOrchestrator
)

const keyOrchestrator = "orchestrator"

// recordState is the state of a module in the record.
type recordState string

const (
	recordCreated  recordState = "created"  // it should run
	recordDeleting recordState = "deleting" // it should end
	recordExited   recordState = "exited"   // it has ended, but is not cleaned up yet
)

// Origins of modules.
const (
	fromControl = "control" // a create message
	fromDesired = "desired" // the desired document; scene.go has the third
)

// record is the record of a module.
type record struct {
	Runtime  string      `json:"runtime"`
	Index    int         `json:"index"`
	State    recordState `json:"state"`
	Origin   string      `json:"origin"`
	ObjectID string      `json:"object_id,omitempty"` // of the create message
	// Confirmed is set when the request of a scene-scoped peer has been answered.
	Confirmed bool   `json:"confirmed,omitempty"`
	Asked     string `json:"asked,omitempty"`  // object_id of a scene-scoped peer's request for the deletion
	Data      []byte `json:"data"`             // a wire.ModuleData, verbatim
	Exited    []byte `json:"exited,omitempty"` // payload of the runtime's message
}

// openStore opens the record. It creates the directory if necessary.
func openStore(root string) (*store.Store, error) {
	dir := filepath.Join(root, "edge")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("the edge manager's record: %w", err)
	}
	s, err := store.Open(filepath.Join(dir, "manager.db"))
	if err != nil {
		return nil, fmt.Errorf("the edge manager's record: %w", err)
	}
	return s, nil
}

func (m *Manager) put(uuid string, r record) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("record module %s: %w", uuid, err)
	}
	if err := m.store.Put(kindModule, uuid, raw); err != nil {
		return fmt.Errorf("record module %s: %w", uuid, err)
	}
	return nil
}

// load loads the record into the hosts. If an entry is unreadable, or its runtime is not configured, load skips the
// entry and leaves it in the record.
func (m *Manager) load() error {
	err := m.store.All(kindModule, func(uuid string, value []byte) error {
		var r record
		var data wire.ModuleData
		err := json.Unmarshal(value, &r)
		if err == nil {
			data, err = wire.ParseModuleData(r.Data)
		}
		if err != nil {
			m.refuse("record", "unreadable record of a module", "module", uuid, "err", err)
			return nil
		}
		h := m.host(r.Runtime)
		if h == nil {
			m.refuse("record", "recorded module of a runtime that is not configured", "module", uuid, "runtime", r.Runtime)
			return nil
		}
		if !h.restore(uuid, r, data) {
			m.refuse("record", "invalid record of a module: its index is in use or out of range, or its state unknown", "module", uuid, "index",
				r.Index, "state", r.State)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("the edge manager's record: %w", err)
	}
	if err := m.exits.load(m); err != nil {
		return fmt.Errorf("the edge manager's record: %w", err)
	}
	err = m.store.All(kindDialect, func(_ string, value []byte) error {
		m.later.Store(string(value) == wire.RequestLater)
		return nil
	})
	if err != nil {
		return fmt.Errorf("the edge manager's record: %w", err)
	}
	return m.store.All(kindDesired, func(rt string, value []byte) error {
		if h := m.host(rt); h != nil {
			h.desired.Store(parseDesired(value))
		}
		return nil
	})
}
