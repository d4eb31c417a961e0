package orchestrator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// key names a record.
type key struct {
	kind Kind
	uuid string
}

// maxRecords bounds the records of a kind, and thereby the memory that peers can make the orchestrator use.
const maxRecords = 1 << 17

// state is the record in memory. It has the same content as the file, because only commit changes it, and only after
// the write to disk.
type state struct {
	mu      sync.RWMutex
	records map[Kind]map[string]*Record
	used    map[string]int // occupied slots, by runtime
	last    uint64         // highest Record.Number
}

func newState() *state {
	return &state{records: map[Kind]map[string]*Record{Manager: {}, Runtime: {}, Module: {}}, used: map[string]int{}}
}

func (s *state) get(k key) *Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.records[k.kind][k.uuid]
}

// list returns the records of a kind, oldest first.
func (s *state) list(kind Kind) []*Record { return s.where(kind, anyRecord) }

// where returns the wanted records of a kind, oldest first.
func (s *state) where(kind Kind, wanted func(*Record) bool) []*Record {
	var all []*Record
	s.any(kind, func(r *Record) bool {
		if wanted(r) {
			all = append(all, r)
		}
		return false
	})
	slices.SortFunc(all, older)
	return all
}

// any reports whether the condition holds for at least one record of a kind.
func (s *state) any(kind Kind, condition func(*Record) bool) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, r := range s.records[kind] {
		if condition(r) {
			return true
		}
	}
	return false
}

// size returns the number of records of a kind, and the highest Record.Number of all kinds.
func (s *state) size(kind Kind) (n int, last uint64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.records[kind]), s.last
}

// older orders records by age.
func older(a, b *Record) int { return cmp.Compare(a.Number, b.Number) }

// apply applies changes; nil removes a record.
func (s *state) apply(changes map[key]*Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, r := range changes {
		count(s.used, s.records[k.kind][k.uuid], -1)
		count(s.used, r, +1)
		if r == nil {
			delete(s.records[k.kind], k.uuid)
			continue
		}
		s.records[k.kind][k.uuid] = r
		s.last = max(s.last, r.Number)
	}
}

// count adds n to the occupied slots of the module's runtime, if the module occupies a slot.
func count(used map[string]int, m *Record, n int) {
	if m == nil || m.Kind != Module || !m.Status.holds() {
		return
	}
	if used[m.Parent] += n; used[m.Parent] == 0 {
		delete(used, m.Parent)
	}
}

// slots returns the number of occupied slots, by runtime.
func (s *state) slots() map[string]int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.used)
}

// find looks a record up for REST: by uuid, then by name, then by a suffix of the uuid. If several records match, find
// prefers the youngest one that is not dead. If no record matches, find returns nil.
func (s *state) find(kind Kind, q string) *Record {
	if r := s.get(key{kind, q}); r != nil {
		return r
	}
	all := s.list(kind)
	for _, matches := range []func(*Record) bool{
		func(r *Record) bool { return r.Name == q },
		func(r *Record) bool { return strings.HasSuffix(r.UUID, q) },
	} {
		if r := youngest(all, matches); r != nil && q != "" {
			return r
		}
	}
	return nil
}

// anyRecord is a filter that accepts all records.
func anyRecord(*Record) bool { return true }

func youngest(all []*Record, matches func(*Record) bool) *Record {
	var found *Record
	for _, r := range all {
		if matches(r) && (found == nil || r.Status != Dead || found.Status == Dead) {
			found = r
		}
	}
	return found
}

// message is a message to publish once its transition is on the disk.
type message struct {
	topic   string
	id      string // object_id of our own request; "" for an answer
	payload []byte
}

// transition collects the changes and messages of one event. When it reads the record, its own changes are already
// visible.
type transition struct {
	o       *Orchestrator
	now     time.Time
	changes map[key]*Record
	out     []message
	numbers uint64
}

func (o *Orchestrator) begin() *transition {
	return &transition{o: o, now: o.config.Now(), changes: map[key]*Record{}}
}

func (t *transition) get(k key) *Record {
	if r, changed := t.changes[k]; changed {
		return r
	}
	return t.o.state.get(k)
}

// list returns the wanted records of a kind, oldest first.
func (t *transition) list(kind Kind, wanted func(*Record) bool) []*Record {
	all := t.o.state.where(kind, func(r *Record) bool {
		if !wanted(r) {
			return false
		}
		_, changed := t.changes[key{kind, r.UUID}]
		return !changed
	})
	for k, r := range t.changes {
		if k.kind == kind && r != nil && wanted(r) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, older)
	return all
}

// edit returns a copy of r that replaces r in the transition. If r already is such a copy, edit returns r itself.
func (t *transition) edit(r *Record) *Record {
	k := key{r.Kind, r.UUID}
	if t.changes[k] == r {
		return r
	}
	c := *r
	t.changes[k] = &c
	return &c
}

// add adds a new record as the youngest of all. If there are maxRecords already, it returns
// errdefs.ErrResourceExhausted.
func (t *transition) add(r *Record) (*Record, error) {
	n, last := t.o.state.size(r.Kind)
	if n+len(t.changes) >= maxRecords && t.get(key{r.Kind, r.UUID}) == nil {
		return nil, fmt.Errorf("the record has %d entries of type %s, which is the limit; request ignored: %w", n, r.Kind,
			errdefs.ErrResourceExhausted)
	}
	t.numbers++
	r.Number = last + t.numbers
	t.changes[key{r.Kind, r.UUID}] = r
	return r, nil
}

func (t *transition) drop(r *Record) { t.changes[key{r.Kind, r.UUID}] = nil }

// enter moves a manager or runtime into a state.
func (t *transition) enter(r *Record, s Status) *Record {
	if r.Status == s {
		return r
	}
	r = t.edit(r)
	r.Status, r.Since = s, t.now
	return r
}

// move applies an event to a module. It returns an error if the event cannot happen in the module's state.
func (t *transition) move(r *Record, e event) (*Record, error) {
	to, err := r.Status.next(e)
	if err != nil {
		return nil, err
	}
	r = t.edit(r)
	r.Status, r.Since = to, t.now
	if to != Killed {
		r.RestartAt, r.Lost = nil, false
	}
	return r, nil
}

// publish queues a message, which is sent once the transition is on the disk.
func (t *transition) publish(topic string, e wire.Envelope) {
	m := message{topic: topic, payload: e.Bytes()}
	if e.IsRequest() {
		m.id = e.ObjectID
	}
	t.out = append(t.out, m)
}

// request makes a request from the orchestrator. If later is set, the request has the message type of later peers.
func request(action string, data wire.ModuleData, later bool) wire.Envelope {
	return wire.Envelope{ObjectID: uuid.NewString(), Action: action, Type: wire.RequestType(later), Data: data.Bytes()}
}

// modulesOf returns the modules of a runtime, oldest first.
func (t *transition) modulesOf(runtime string) []*Record {
	return t.list(Module, func(m *Record) bool { return m.Parent == runtime })
}
