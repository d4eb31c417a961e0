package delegate

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Record keeps what must survive a restart. *store.Store implements it.
type Record interface {
	All(kind string, each func(key string, value []byte) error) error
	Update(kind string, put map[string][]byte, remove []string) error
}

// The store's kinds: the owners of pods and containers by ID, and the endpoints by name.
const (
	kindOwner    = "delegate-owners"
	kindEndpoint = "delegates"
)

// owner is the record of one pod or container at an endpoint.
type owner struct {
	Endpoint string `json:"endpoint"`
	// UID is the pod's UID; empty for a container.
	UID string `json:"uid,omitempty"`
	// Pod is the ID of the container's pod; empty for a pod.
	Pod string `json:"pod,omitempty"`

	endpoint *endpoint
	// since is the endpoint's clock when the entry was made. A list that was requested earlier cannot remove it.
	since uint64
}

// endpointRecord is the record of one endpoint.
type endpointRecord struct {
	// Listed means that all of the endpoint's pods have been listed once, so every ID that a client can know has an owner.
	Listed bool `json:"listed"`
	// Empty means that the endpoint has no pods.
	Empty bool `json:"empty"`
}

// owners maps the IDs of pods and containers to endpoints.
type owners struct {
	record Record
	log    *slog.Logger

	mu    sync.RWMutex
	byID  map[string]*owner
	state map[*endpoint]endpointRecord
}

// openOwners reads the record. It forgets the pods of endpoints that are no longer configured.
func openOwners(record Record, endpoints []*endpoint, log *slog.Logger) (*owners, error) {
	o := &owners{record: record, log: log, byID: map[string]*owner{}, state: map[*endpoint]endpointRecord{}}
	named := map[string]*endpoint{}
	for _, e := range endpoints {
		named[e.Name] = e
	}
	err := record.All(kindEndpoint, func(name string, raw []byte) error {
		var state endpointRecord
		if err := json.Unmarshal(raw, &state); err != nil {
			return fmt.Errorf("the record of delegate %s: %w: %w", name, err, errdefs.ErrDataLoss)
		}
		if e := named[name]; e != nil {
			o.state[e] = state
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	lost := map[string][]string{}
	err = record.All(kindOwner, func(id string, raw []byte) error {
		entry := &owner{}
		if err := json.Unmarshal(raw, entry); err != nil {
			return fmt.Errorf("the owner of %s: %w: %w", id, err, errdefs.ErrDataLoss)
		}
		if entry.endpoint = named[entry.Endpoint]; entry.endpoint == nil {
			lost[entry.Endpoint] = append(lost[entry.Endpoint], id)
			return nil
		}
		o.byID[id] = entry
		return nil
	})
	if err != nil {
		return nil, err
	}
	for name, ids := range lost {
		log.Warn("a delegate with pods is no longer configured; its pods run on without the node", "delegate", name, "ids", len(ids))
		o.write(kindOwner, nil, ids)
		o.write(kindEndpoint, nil, []string{name})
	}
	return o, nil
}

// find returns the full ID and the owner of a pod or container, by ID or unique prefix; nil if the ID is unknown.
func (o *owners) find(id string) (string, *owner, error) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if entry := o.byID[id]; entry != nil {
		return id, entry, nil
	}
	var full string
	for known := range o.byID {
		if !strings.HasPrefix(known, id) {
			continue
		}
		if full != "" {
			return "", nil, fmt.Errorf("ID %q is the beginning of %s and %s: %w", id, full, known, errdefs.ErrInvalidArgument)
		}
		full = known
	}
	return full, o.byID[full], nil
}

// podOf returns the ID of a container's pod, if it is known.
func (o *owners) podOf(containerID string) string {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if entry := o.byID[containerID]; entry != nil {
		return entry.Pod
	}
	return ""
}

// ofUID returns the endpoint of the pod with a UID; nil if it is unknown.
func (o *owners) ofUID(uid string) *endpoint {
	o.mu.RLock()
	defer o.mu.RUnlock()
	for _, entry := range o.byID {
		if uid != "" && entry.UID == uid {
			return entry.endpoint
		}
	}
	return nil
}

func (o *owners) isEmpty(e *endpoint) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.state[e].Empty
}

func (o *owners) isListed(e *endpoint) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.state[e].Listed
}

// setState writes an endpoint's record if it changes.
func (o *owners) setState(e *endpoint, state endpointRecord) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.state[e] == state {
		return nil
	}
	raw, err := json.Marshal(state)
	if err != nil {
		return err
	}
	if err := o.record.Update(kindEndpoint, map[string][]byte{e.Name: raw}, nil); err != nil {
		return err
	}
	o.state[e] = state
	return nil
}

// add records the owners of new IDs, and returns once they are on disk. If they cannot be written, they are known until
// the daemon ends; after that, the endpoint's own lists say whose they are.
func (o *owners) add(entries map[string]*owner) {
	put := map[string][]byte{}
	o.mu.Lock()
	for id, entry := range entries {
		if o.byID[id] != nil {
			continue
		}
		entry.Endpoint = entry.endpoint.Name
		o.byID[id] = entry
		put[id], _ = json.Marshal(entry) // only strings
	}
	o.mu.Unlock()
	o.write(kindOwner, put, nil)
}

// remove forgets a pod with its containers, or a container.
func (o *owners) remove(id string) {
	o.removeIf(func(known string, entry *owner) bool { return known == id || entry.Pod == id })
}

func (o *owners) removeIf(gone func(id string, entry *owner) bool) {
	var removed []string
	o.mu.Lock()
	for id, entry := range o.byID {
		if gone(id, entry) {
			removed = append(removed, id)
			delete(o.byID, id)
		}
	}
	o.mu.Unlock()
	o.write(kindOwner, nil, removed)
}

func (o *owners) write(kind string, put map[string][]byte, remove []string) {
	if len(put)+len(remove) == 0 {
		return
	}
	if err := o.record.Update(kind, put, remove); err != nil {
		o.log.Warn("the owners of pods are not recorded", "ids", slices.Concat(slices.Collect(maps.Keys(put)), remove), "err", err)
	}
}

// learn records what a list of pods or containers says. A whole list also says what the endpoint no longer has, and
// whether it is empty.
func (o *owners) learn(e *endpoint, l *listing, items []proto.Message, began uint64, whole bool) {
	if l != podList && l != containerList {
		return
	}
	listed := map[string]*owner{}
	for _, item := range items {
		switch item := item.(type) {
		case *runtimeapi.PodSandbox:
			listed[item.GetId()] = &owner{endpoint: e, UID: item.GetMetadata().GetUid(), since: began}
		case *runtimeapi.Container:
			listed[item.GetId()] = &owner{endpoint: e, Pod: item.GetPodSandboxId(), since: began}
		}
	}
	o.add(listed)
	if !whole {
		return
	}
	o.removeIf(func(id string, entry *owner) bool {
		return entry.endpoint == e && (entry.Pod == "") == (l == podList) && entry.since <= began && listed[id] == nil
	})
	if l == podList {
		o.learnEmpty(e, len(items) == 0, began)
	}
}

// learnEmpty records whether the endpoint has pods, unless one was made since the list was requested.
func (o *owners) learnEmpty(e *endpoint, empty bool, began uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	state := endpointRecord{Listed: true, Empty: empty && e.running == 0 && began >= e.created[podList]}
	if err := o.setState(e, state); err != nil {
		o.log.Warn("the state of the endpoint is not recorded", "delegate", e.Name, "err", err)
	}
}
