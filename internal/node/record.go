package node

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Pod is one record of the node: a pod with its containers. A published Pod is immutable; a transition publishes a new
// one. Its State is Initiated or Killed, or empty while RunPodSandbox is under way.
type Pod struct {
	ID string
	// Handler is the backend's name. Alias is the alias that the pod asked for, if any.
	Handler, Alias string
	// Component is the name of the component in a unit pod's labels; see ComponentName.
	Component string
	// Config is the request, with the resources and the overhead that were last requested.
	Config *runtimeapi.PodSandboxConfig
	// NodeIDs means that the node chose the range of the pod's user namespace, which Config contains. The callers of
	// such a pod do not know the range.
	NodeIDs bool
	State   State
	// Netns is the path of the pod's network namespace; empty on the host network.
	Netns     string
	IPs       []netip.Addr
	CreatedAt time.Time
	// Intent is the call that was ordered and has not completed; empty if there is none.
	Intent Call
	// Resizing means that the resources in Config are recorded but not applied.
	Resizing bool
	// Containers are in order of creation. A unit pod has at most one, the newest attempt. A Removed attempt stays,
	// hidden, until the next CreateContainer.
	Containers []*Container
	// Previous holds the records of a unit pod's earlier attempts, oldest first. At most maxPrevious are kept.
	Previous []*Container
	// Attempts counts a unit pod's attempts; the newest attempt's ID contains this number.
	Attempts uint64

	unit      bool
	unitState State // set in views, which omit a Removed container
}

// Container is the record of one container. Its State is one of Created to Removed, or empty while CreateContainer is
// under way.
type Container struct {
	ID    string
	PodID string
	// Handler is the handler whose backend runs the container. It is empty if that is the pod's handler, and otherwise
	// the container is a foreign container (foreign.go).
	Handler string
	// Config is the effective configuration: the request, with what plugins and updates changed.
	Config *runtimeapi.ContainerConfig
	// Request is the configuration that clients asked for, by CreateContainer and UpdateContainerResources, if plugins
	// changed it, otherwise nil.
	Request *runtimeapi.ContainerConfig
	// Adjustment is what plugins changed beyond Config; nil if there is nothing.
	Adjustment *nri.ContainerAdjustment
	// Channels are those in the annotation keys.EdgeChannels of Config, which records them.
	Channels []channel.Channel
	ImageID  string
	// ImageRef is a repository digest of the image, or its ID if the image has no digest.
	ImageRef   string
	State      State
	Resolved   sandbox.Resolved
	CreatedAt  time.Time
	StartedAt  time.Time
	FinishedAt time.Time
	ExitCode   int32
	Reason     string
	Message    string
	Pid        int
	// Unlisted hides the container of a Killed unit pod, after its removal was requested.
	Unlisted bool
	// Intent is RemoveContainer, intentRetain or intentUpdate until the order is complete.
	Intent Call

	unit bool
}

const (
	// intentUpdate marks a container whose new resources are recorded but not applied.
	intentUpdate Call = "UpdateContainerResources"
	// intentResize is the order to change the resources of a whole pod.
	intentResize Call = "UpdatePodSandboxResources"
	// intentRetain marks an ended attempt whose resources are being removed and whose record moves to Pod.Previous.
	intentRetain Call = "RetainAttempt"
)

// maxPrevious is how many ended attempts of a unit pod are kept. A kubelet keeps one attempt by default.
const maxPrevious = 16

// Ready reports whether the sandbox accepts containers (CRI SANDBOX_READY).
func (p *Pod) Ready() bool { return p.State == Initiated }

// RuntimeHandler returns the name that the pod's request used for its handler.
func (p *Pod) RuntimeHandler() string { return cmp.Or(p.Alias, p.Handler) }

func (p *Pod) Unit() bool { return p.unit }

// UnitState returns the state of a unit pod: a row of the table in seed 1.
func (p *Pod) UnitState() State {
	if p.unitState != "" {
		return p.unitState
	}
	if p.State != Initiated {
		return p.State
	}
	if len(p.Containers) > 0 && p.Containers[0].State != "" {
		return p.Containers[0].State
	}
	if len(p.Previous) > 0 { // creating the next attempt failed
		return Removed
	}
	return p.State
}

// Container finds a container of the pod; nil if it is missing or Removed. A unit pod's ID means its newest attempt.
func (p *Pod) Container(id string) *Container {
	containers := p.Visible()
	if p.unit && id == p.ID && len(containers) > 0 {
		return containers[len(containers)-1]
	}
	return byID(containers, id)
}

func byID(containers []*Container, id string) *Container {
	if i := slices.IndexFunc(containers, func(c *Container) bool { return c.ID == id }); i >= 0 {
		return containers[i]
	}
	return nil
}

// ComponentName returns the component that the pod runs, from the pod's labels or from the backend; empty if the pod
// runs none.
func (p *Pod) ComponentName() string {
	if p.Component == "" && p.unit && len(p.Containers) > 0 && p.Containers[0].visible() {
		return p.Containers[0].Resolved.Component
	}
	return p.Component
}

// Visible lists the containers that control planes can see: the previous attempts, and the containers that have been
// created and not removed.
func (p *Pod) Visible() []*Container {
	made := p.present()
	if len(p.Previous) == 0 {
		return made
	}
	return slices.Concat(p.Previous, made)
}

// present lists the containers that have been created and not removed.
func (p *Pod) present() []*Container {
	if !slices.ContainsFunc(p.Containers, func(c *Container) bool { return !c.visible() }) {
		return p.Containers
	}
	seen := make([]*Container, 0, len(p.Containers))
	for _, c := range p.Containers {
		if c.visible() {
			seen = append(seen, c)
		}
	}
	return seen
}

func (c *Container) visible() bool { return c.State != "" && c.State != Removed }

// key identifies a container within its pod, by the name and the attempt number that the kubelet gave it.
func (c *Container) key() string { return containerKey(c.Config.GetMetadata()) }

func containerKey(m *runtimeapi.ContainerMetadata) string {
	return fmt.Sprintf("%s_%d", m.GetName(), m.GetAttempt())
}

// podKey identifies a RunPodSandbox request: name, namespace, uid and attempt. A second request with the same key
// repeats the first.
func podKey(m *runtimeapi.PodSandboxMetadata) string {
	return fmt.Sprintf("%s_%s_%s_%d", m.GetName(), m.GetNamespace(), m.GetUid(), m.GetAttempt())
}

// clone copies the pod and its containers for the next record; the configurations are shared.
func (p *Pod) clone() *Pod {
	next := *p
	next.Containers = make([]*Container, len(p.Containers))
	for i, c := range p.Containers {
		copied := *c
		next.Containers[i] = &copied
	}
	next.Previous = slices.Clone(p.Previous)
	return &next
}

// find returns a container in any state, but not a previous attempt; nil if there is none. A unit pod's ID means its
// newest attempt.
func (p *Pod) find(id string) *Container {
	if p.unit && id == p.ID && len(p.Containers) > 0 {
		return p.Containers[0]
	}
	return byID(p.Containers, id)
}

func (p *Pod) previous(id string) *Container { return byID(p.Previous, id) }

// retain moves an ended attempt to Previous. If Previous then holds more than maxPrevious attempts, retain drops the
// oldest from the record.
func (p *Pod) retain(c *Container) {
	p.drop(c.ID)
	c.Intent = ""
	p.Previous = append(p.Previous, c)
	if surplus := len(p.Previous) - maxPrevious; surplus > 0 {
		p.Previous = slices.Delete(p.Previous, 0, surplus)
	}
}

func (p *Pod) drop(id string) {
	p.Containers = slices.DeleteFunc(p.Containers, func(c *Container) bool { return c.ID == id })
}

// sandboxPod describes the pod to a backend.
func (p *Pod) sandboxPod() *sandbox.Pod {
	return &sandbox.Pod{ID: p.ID, Handler: p.Handler, Config: p.Config, Netns: p.Netns, IPs: p.IPs}
}

// sandboxContainer describes the container to a backend.
func (c *Container) sandboxContainer() *sandbox.Container {
	return &sandbox.Container{ID: c.backendID(), Config: c.Config, ImageID: c.ImageID, Adjustment: c.Adjustment, Channels: c.Channels}
}

// backendID returns the container's ID in its backend. There, all attempts of a unit pod are one object with the pod's
// ID.
func (c *Container) backendID() string {
	if c.unit {
		return c.PodID
	}
	return c.ID
}

// finish records the exit that the backend reported.
func (c *Container) finish(s sandbox.Status) {
	c.State, c.Pid = Stopped, 0
	if !s.StartedAt.IsZero() {
		c.StartedAt = s.StartedAt
	}
	c.FinishedAt, c.ExitCode, c.Reason, c.Message = s.FinishedAt, s.ExitCode, s.Reason, s.Message
	if c.FinishedAt.IsZero() {
		c.FinishedAt = time.Now()
	}
	if c.StartedAt.IsZero() {
		c.StartedAt = c.CreatedAt
	}
	if c.Reason == "" {
		c.Reason = sandbox.ReasonError
		if c.ExitCode == 0 {
			c.Reason = sandbox.ReasonCompleted
		}
	}
}

// recordVersion is the version of the encoding of podRecord. Records of a later version are refused.
//
//	1  the container of a unit pod has the pod's ID
//	2  each attempt has an ID of its own
//	3  a container can have another handler than its pod
//
// A record without such a container is of version 2, so that an earlier release can read it.
const (
	recordVersion      = 3
	recordVersionPlain = 2
)

// podRecord is the stored form of a Pod: JSON, with CRI messages in protobuf encoding, which preserves fields that this
// program does not know.
type podRecord struct {
	Version    int               `json:"version"`
	ID         string            `json:"id"`
	Handler    string            `json:"handler"`
	Alias      string            `json:"alias,omitempty"`
	Component  string            `json:"component,omitempty"`
	Unit       bool              `json:"unit,omitempty"`
	Config     []byte            `json:"config"`
	NodeIDs    bool              `json:"nodeIDs,omitempty"`
	State      State             `json:"state"`
	Netns      string            `json:"netns,omitempty"`
	IPs        []netip.Addr      `json:"ips,omitempty"`
	CreatedAt  time.Time         `json:"createdAt"`
	Intent     Call              `json:"intent,omitempty"`
	Resizing   bool              `json:"resizing,omitempty"`
	Containers []containerRecord `json:"containers,omitempty"`
	Previous   []containerRecord `json:"previous,omitempty"`
	Attempts   uint64            `json:"attempts,omitempty"`
}

type containerRecord struct {
	ID          string    `json:"id"`
	Handler     string    `json:"handler,omitempty"`
	Config      []byte    `json:"config"`
	Request     []byte    `json:"request,omitempty"`
	Adjustment  []byte    `json:"adjustment,omitempty"`
	ImageID     string    `json:"imageID,omitempty"`
	ImageRef    string    `json:"imageRef,omitempty"`
	State       State     `json:"state"`
	User        []byte    `json:"user,omitempty"`
	Mounts      [][]byte  `json:"mounts,omitempty"`
	StopSignal  int32     `json:"stopSignal,omitempty"`
	SwapLimited bool      `json:"swapLimited,omitempty"`
	CreatedAt   time.Time `json:"createdAt"`
	StartedAt   time.Time `json:"startedAt,omitzero"`
	FinishedAt  time.Time `json:"finishedAt,omitzero"`
	ExitCode    int32     `json:"exitCode,omitempty"`
	Reason      string    `json:"reason,omitempty"`
	Message     string    `json:"message,omitempty"`
	Pid         int       `json:"pid,omitempty"`
	Component   string    `json:"component,omitempty"`
	Unlisted    bool      `json:"unlisted,omitempty"`
	Intent      Call      `json:"intent,omitempty"`
}

func versionOf(p *Pod) int {
	if len(p.handlers()) > 1 {
		return recordVersion
	}
	return recordVersionPlain
}

func encodePod(p *Pod) ([]byte, error) {
	config, err := proto.Marshal(p.Config)
	if err != nil {
		return nil, fmt.Errorf("encode pod %s: %w", p.ID, err)
	}
	r := podRecord{
		Version: versionOf(p), ID: p.ID, Handler: p.Handler, Alias: p.Alias, Component: p.Component, Unit: p.unit, Config: config,
		NodeIDs: p.NodeIDs,
		State:   p.State, Netns: p.Netns, IPs: p.IPs, CreatedAt: p.CreatedAt, Intent: p.Intent, Resizing: p.Resizing, Attempts: p.Attempts,
	}
	if r.Containers, err = encodeContainers(p.Containers); err != nil {
		return nil, err
	}
	if r.Previous, err = encodeContainers(p.Previous); err != nil {
		return nil, err
	}
	return json.Marshal(r)
}

func encodeContainers(containers []*Container) ([]containerRecord, error) {
	var records []containerRecord
	for _, c := range containers {
		r, err := encodeContainer(c)
		if err != nil {
			return nil, fmt.Errorf("encode container %s: %w", c.ID, err)
		}
		records = append(records, r)
	}
	return records, nil
}

func encodeContainer(c *Container) (containerRecord, error) {
	r := containerRecord{
		ID: c.ID, Handler: c.Handler, ImageID: c.ImageID, ImageRef: c.ImageRef, State: c.State, StopSignal: int32(c.Resolved.StopSignal),
		SwapLimited: c.Resolved.SwapLimited,
		CreatedAt:   c.CreatedAt, StartedAt: c.StartedAt, FinishedAt: c.FinishedAt, ExitCode: c.ExitCode,
		Reason: c.Reason, Message: c.Message, Pid: c.Pid, Component: c.Resolved.Component, Unlisted: c.Unlisted, Intent: c.Intent,
	}
	var err error
	if r.Config, err = proto.Marshal(c.Config); err != nil {
		return r, err
	}
	if c.Request != nil {
		if r.Request, err = proto.Marshal(c.Request); err != nil {
			return r, err
		}
	}
	if r.Adjustment, err = encodeAdjustment(c.Adjustment); err != nil {
		return r, err
	}
	if c.Resolved.User != nil {
		if r.User, err = proto.Marshal(c.Resolved.User); err != nil {
			return r, err
		}
	}
	for _, m := range c.Resolved.Mounts {
		raw, err := proto.Marshal(m)
		if err != nil {
			return r, err
		}
		r.Mounts = append(r.Mounts, raw)
	}
	return r, nil
}

func decodePod(raw []byte) (*Pod, error) {
	var r podRecord
	if err := json.Unmarshal(raw, &r); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	if r.Version < 1 || r.Version > recordVersion {
		return nil, fmt.Errorf("record version %d is not 1 to %d: start the version of tripod that wrote it: %w", r.Version, recordVersion,
			errdefs.ErrFailedPrecondition)
	}
	p := &Pod{
		ID: r.ID, Handler: r.Handler, Alias: r.Alias, Component: r.Component, unit: r.Unit, Config: &runtimeapi.PodSandboxConfig{},
		NodeIDs: r.NodeIDs, State: r.State, Netns: r.Netns, IPs: r.IPs, CreatedAt: r.CreatedAt, Intent: r.Intent, Resizing: r.Resizing,
		Attempts: r.Attempts,
	}
	err := proto.Unmarshal(r.Config, p.Config)
	if err == nil {
		p.Containers, err = decodeContainers(p, r.Containers)
	}
	if err == nil {
		p.Previous, err = decodeContainers(p, r.Previous)
	}
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w: %w", r.ID, err, errdefs.ErrDataLoss)
	}
	if r.Version == 1 {
		p.migrateAttemptID()
	}
	return p, nil
}

// migrateAttemptID turns a unit pod's container of version 1 into its first attempt.
func (p *Pod) migrateAttemptID() {
	if !p.unit || len(p.Containers) == 0 {
		return
	}
	p.Attempts = 1
	p.Containers[0].ID = p.attemptID(p.Attempts)
}

func decodeContainers(p *Pod, records []containerRecord) ([]*Container, error) {
	var containers []*Container
	for _, r := range records {
		c, err := decodeContainer(r)
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", r.ID, err)
		}
		c.PodID, c.unit = p.ID, p.unit
		containers = append(containers, c)
	}
	return containers, nil
}

func decodeContainer(r containerRecord) (*Container, error) {
	c := &Container{
		ID: r.ID, Handler: r.Handler, Config: &runtimeapi.ContainerConfig{}, ImageID: r.ImageID, ImageRef: r.ImageRef,
		State: r.State, CreatedAt: r.CreatedAt, StartedAt: r.StartedAt, FinishedAt: r.FinishedAt, ExitCode: r.ExitCode,
		Reason: r.Reason, Message: r.Message, Pid: r.Pid, Unlisted: r.Unlisted, Intent: r.Intent,
		Resolved: sandbox.Resolved{StopSignal: runtimeapi.Signal(r.StopSignal), SwapLimited: r.SwapLimited, Component: r.Component},
	}
	if err := proto.Unmarshal(r.Config, c.Config); err != nil {
		return nil, err
	}
	var err error
	if c.Channels, err = channelsIn(c.Config); err != nil {
		return nil, err
	}
	if r.Request != nil {
		c.Request = &runtimeapi.ContainerConfig{}
		if err := proto.Unmarshal(r.Request, c.Request); err != nil {
			return nil, err
		}
	}
	if c.Adjustment, err = decodeAdjustment(r.Adjustment); err != nil {
		return nil, err
	}
	if r.User != nil {
		c.Resolved.User = &runtimeapi.ContainerUser{}
		if err := proto.Unmarshal(r.User, c.Resolved.User); err != nil {
			return nil, err
		}
	}
	for _, raw := range r.Mounts {
		m := &runtimeapi.Mount{}
		if err := proto.Unmarshal(raw, m); err != nil {
			return nil, err
		}
		c.Resolved.Mounts = append(c.Resolved.Mounts, m)
	}
	return c, nil
}
