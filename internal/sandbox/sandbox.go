package sandbox

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/stats"
)

// Pod describes a pod to a backend: its identity, configuration and network, but never its state. It is immutable.
type Pod struct {
	// ID is the sandbox ID: 64 lower-case hex digits, or component#n for a unit pod that runs a component.
	ID string
	// Handler is the RuntimeClass handler that chose the backend.
	Handler string
	// Config is the configuration from the RunPodSandbox request, with the resources and the overhead from the last
	// UpdatePodSandboxResources request.
	Config *runtimeapi.PodSandboxConfig
	// Netns is the path of the pod's network namespace; empty if the pod uses the host's namespace.
	Netns string
	// IPs are the pod's addresses, the primary one first; empty on the host network.
	IPs []netip.Addr
}

// Container describes a container to a backend. It is immutable.
type Container struct {
	// ID is the container ID. In a unit pod, every attempt of the container has the pod's ID; the node keeps the
	// attempts' records apart.
	ID string
	// Config is the configuration from the CreateContainer request, with the resources from the last
	// UpdateContainerResources request.
	Config *runtimeapi.ContainerConfig
	// ImageID is the image that Config.Image referred to when the container was created (Image.id of the CRI).
	ImageID string
	// Adjustment is what plugins of the node changed beyond Config; nil if there is nothing. Only a Specifier gets
	// adjustments that have an effect.
	Adjustment *nri.ContainerAdjustment
	// Channels are those of a module of the edge; only a Channeler honours them.
	Channels []channel.Channel
}

// Backend makes, runs and removes the pods of one kind of isolation. Implementations: internal/sandbox/linux,
// internal/sandbox/wasm, internal/sandbox/vm.
//
// The node calls methods concurrently, but has only one order at a time under way for a container. The only exception:
// it may call StopContainer again, with a shorter grace period, while an earlier call waits. A method returns soon
// after its context ends, and leaves its work in a state that a repeated call or the matching removal can handle.
// Errors carry an errdefs class; an error without a class is an internal fault.
type Backend interface {
	// Capabilities returns what the backend can do. The result never changes.
	Capabilities() Capabilities

	// Validate returns an error if the backend does not support a field of the container or, if c is nil, of the pod.
	// The error is errdefs.ErrInvalidArgument or errdefs.ErrNotImplemented and names the field. Validate has no side
	// effects.
	Validate(p *Pod, c *Container) error

	// CreateSandbox makes the resources that the pod's containers share (pinned namespaces, cgroup, /dev/shm …). The pod's
	// network is already up.
	CreateSandbox(ctx context.Context, p *Pod) error
	// StopSandbox ends the sandbox's processes and releases the pod's network namespace. The pod's containers have
	// already stopped.
	StopSandbox(ctx context.Context, p *Pod) error
	// RemoveSandbox removes every trace of the pod, even of a pod that was created only in part. The pod's containers
	// are already removed.
	RemoveSandbox(ctx context.Context, p *Pod) error

	// CreateContainer prepares a container (root filesystem, bundle, definition) without running it.
	CreateContainer(ctx context.Context, p *Pod, c *Container) (Resolved, error)
	// StartContainer returns once the container runs. If the container is a server that the backend can probe,
	// StartContainer also waits until the server is ready. StartContainer can restart a stopped container. If the
	// program cannot be started, the error's class is errdefs.ErrFailedPrecondition or ErrInvalidArgument, and Status
	// then reports the reason StartError and the exit code.
	StartContainer(ctx context.Context, p *Pod, c *Container) error
	// StopContainer asks the container to end, kills it after the grace period (immediately if grace is 0) and returns
	// when the container is dead. If ctx ends first, StopContainer stops waiting, but the container still ends.
	StopContainer(ctx context.Context, p *Pod, c *Container, grace time.Duration) error
	// RemoveContainer kills the container's remaining processes and removes every trace of it.
	RemoveContainer(ctx context.Context, p *Pod, c *Container) error
	// Status returns the container's current status, without waiting for an order under way. A missing container has
	// StateAbsent, which is not an error. Status reports an end no later than the event about it.
	Status(ctx context.Context, p *Pod, c *Container) (Status, error)

	// Recover is called once, before any other method except Capabilities. It adopts the known pods that still exist,
	// removes everything else that carries this backend's mark, and from then on reports events to sink. If Recover
	// returns ErrAway, the backend receives no orders and Recover is called again.
	Recover(ctx context.Context, known []Known, sink Sink) (Found, error)
}

// ErrAway is Recover's error while a dependency of the backend, such as another daemon, is missing.
var ErrAway = errors.New("the backend is waiting for it to come back")

// ErrMemoryKept is UpdateSandbox's error if the pod's memory cannot change, and all its other resources have changed.
var ErrMemoryKept = errors.New("only the pod's other resources have changed")

// Capabilities describes a backend to the node and the control planes.
type Capabilities struct {
	// MaxContainers is the maximum number of containers in a pod at a time; 0 means no limit. If the maximum is 1, the
	// pods are unit pods: a pod and its container share one state and, in the backend, one ID.
	MaxContainers int
	// Components means that a pod's labels can name the component to run. Such a pod has an ID of the form component#n.
	Components bool
	// ForeignPods means that a backend with unit pods can also run single containers in the pods of other backends. The
	// ID of such a container is not the pod's, and the backend gets no orders for the sandbox. The container uses the
	// pod's network namespace and cgroup; when StopContainer returns, no process of the container is left in them.
	ForeignPods bool
	// HostNetwork means that pods may use the node's network namespace.
	HostNetwork bool
	// RecursiveReadOnlyMounts, MountOptions (noexec, nodev, nosuid), UserNamespaces and SupplementalGroupsPolicy mean
	// that pods may use these features. The CRI's Status call reports them.
	RecursiveReadOnlyMounts  bool
	MountOptions             bool
	UserNamespaces           bool
	SupplementalGroupsPolicy bool
	// MapsIDs means that a pod with a user namespace needs a range of the node's user and group IDs for itself. It is
	// false for backends whose pods have no users of the node, and so accept user namespaces without effect.
	MapsIDs bool
}

// Unit reports whether the backend's pods are unit pods.
func (c Capabilities) Unit() bool { return c.MaxContainers == 1 }

// Resolved holds the facts that only the backend can derive from a container's configuration. The node records them. A backend
// that records them, too, so that a repeated CreateContainer returns the same answer, does so in this form.
type Resolved struct {
	// User is the identity of the first process (CRI ContainerStatus.user); nil if the backend has none.
	User *runtimeapi.ContainerUser `json:"user,omitempty"`
	// Mounts are the actual mounts; image volumes include their image reference (CRI ContainerStatus.mounts).
	Mounts []*runtimeapi.Mount `json:"mounts,omitempty"`
	// StopSignal is the effective signal, from the request or from the image.
	StopSignal runtimeapi.Signal `json:"stopSignal"`
	// SwapLimited means that a memory limit without a swap limit covers memory and swap together.
	SwapLimited bool `json:"swapLimited,omitempty"`
	// Component is the name of the component that the container runs (domain:server@version), if the backend derived
	// the name from the image. It is empty if the labels name the component, or if the container runs none.
	Component string `json:"component,omitempty"`
}

type State int

const (
	// StateAbsent: the container does not exist.
	StateAbsent State = iota
	// StateCreated: prepared, not running.
	StateCreated
	StateRunning
	// StateExited: the container ran and has ended, or it failed to start.
	StateExited
)

// Exit reasons of a container (CRI ContainerStatus.reason).
const (
	ReasonCompleted  = "Completed"
	ReasonError      = "Error"
	ReasonOOMKilled  = "OOMKilled"
	ReasonStartError = "StartError"
	// ReasonGuestPanic: the virtual machine's kernel reported a panic.
	ReasonGuestPanic = "GuestPanic"
	// ReasonNoBootableDevice: the virtual machine's firmware found nothing to boot.
	ReasonNoBootableDevice = "NoBootableDevice"
	// ReasonSeccomp: the container made a system call that its seccomp profile forbids, and was stopped for it. CRI-O uses
	// the same words.
	ReasonSeccomp = "seccomp killed"
	// ReasonUnknown: the exit was not observed (the node rebooted, a helper was killed).
	ReasonUnknown = "Unknown"
)

// Exit codes that are not the program's own.
const (
	// ExitStartError is the code of a container whose program failed to start.
	ExitStartError = 128
	// ExitKilled is the code of a container that was killed, 128 + SIGKILL.
	ExitKilled = 137
	// ExitUnknown is the code of a container whose exit was not observed.
	ExitUnknown = 255
)

type Status struct {
	State      State
	Pid        int
	StartedAt  time.Time
	FinishedAt time.Time
	ExitCode   int32
	// Reason is one of the Reason constants; Message explains the reason to people.
	Reason  string
	Message string
}

// Event reports that a run of a container has ended. It can arrive when the container already runs again. If ContainerID
// is empty, the event reports that the sandbox became unusable, because its init process or machine is gone. If
// Compilation is set, the event is about an image instead. If Fallback is set, the run has not ended: it is slower than it
// could be, for that reason.
type Event struct {
	PodID       string
	ContainerID string
	Status      Status
	Compilation *Compilation
	Fallback    string
}

// Sink receives events. It does not block and is safe for concurrent use.
type Sink func(Event)

// Known is one pod and its containers, as the node has recorded them.
type Known struct {
	Pod        *Pod
	Containers []*Container
	// Stopped means that the sandbox was stopped, so its shared resources do not exist, as they should not.
	Stopped bool
}

// Found is the result of Recover: the known pods and containers that still exist.
type Found struct {
	// Sandboxes holds the IDs of pods whose shared resources all exist.
	Sandboxes map[string]bool
	// Containers maps container IDs to their status; a missing ID means StateAbsent.
	Containers map[string]Status
}

// NewFound returns an empty result.
func NewFound() Found {
	return Found{Sandboxes: map[string]bool{}, Containers: map[string]Status{}}
}

// Add adds a container to the result, unless the container is absent.
func (f Found) Add(id string, s Status) {
	if s.State != StateAbsent {
		f.Containers[id] = s
	}
}

// ExecRequest is a program to run inside a running container.
type ExecRequest struct {
	Cmd    []string
	TTY    bool
	Stdin  io.Reader // nil: empty
	Stdout io.Writer // nil: discarded
	Stderr io.Writer // nil: discarded; unused with TTY
	Resize <-chan TermSize
}

// AttachRequest connects a client to a running container's stdio.
type AttachRequest struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	TTY    bool
	Resize <-chan TermSize
}

type TermSize struct{ Width, Height uint16 }

// NetnsMaker is for backends that make the network namespace of a pod with an IDMap themselves, because the pod's user
// namespace must own it. The node calls MakeNetns before CreateSandbox, unless the pod is on the host network. MakeNetns
// pins the network namespace on the given file. The caller removes this pin, and RemoveSandbox everything else that
// MakeNetns has made.
type NetnsMaker interface {
	MakeNetns(p *Pod, pin string) error
}

// Execer runs additional programs in the backend's containers. Exec returns the program's exit code, even if it is not
// 0; an error means that the program could not be run or watched. Exec kills the program when ctx ends. If one of the
// program's children keeps the stdio open after the program has ended, Exec waits for further output only until a
// deadline.
type Execer interface {
	Exec(ctx context.Context, p *Pod, c *Container, req ExecRequest) (exitCode int32, err error)
}

// Attacher connects clients to containers' stdio. Attach returns when the container ends, the client disconnects or ctx
// ends.
type Attacher interface {
	Attach(ctx context.Context, p *Pod, c *Container, req AttachRequest) error
}

// Dialer is for backends whose pods do not listen in their network namespace, but elsewhere, for example in a guest.
// Dial takes the same networks and addresses as net.Dialer; a loopback address is the guest's own. For backends without
// a Dialer, the node connects from inside the namespace. A refused connection or a timeout is errdefs.ErrUnavailable.
// If the pod has no running container, c is nil.
type Dialer interface {
	Dial(ctx context.Context, p *Pod, c *Container, network, address string) (net.Conn, error)
}

// Channeler is for backends whose containers can have channels (Container.Channels). Channels returns a connection that
// speaks the protocol of internal/channel. A later connection for the same container replaces the earlier one, and the
// container's channels are opened again on the new connection. Containers with the same non-empty group deliver
// messages directly to each other. The connection ends when the container ends. The caller must close the connection.
//
// Errors: ErrFailedPrecondition if the container does not run or has no channels, ErrUnavailable if the process that
// runs the container does not answer.
type Channeler interface {
	Channels(ctx context.Context, p *Pod, c *Container) (conn net.Conn, group string, err error)
}

// LogReopener is for backends that write CRI log files and can reopen them after a rotation.
type LogReopener interface {
	ReopenLog(ctx context.Context, p *Pod, c *Container) error
}

// Updater changes the resources of a created or running container in place. c.Config already holds the new resources,
// merged with the old ones. If UpdateContainer fails, the node calls it again with the old resources.
type Updater interface {
	UpdateContainer(ctx context.Context, p *Pod, c *Container) error
}

// DiskAttacher is for backends whose running containers, which are machines, can get and lose disks. The disks are gone when
// the container ends. If a call fails or the daemon dies, a repeated call completes it.
//
// AttachDisk does nothing if the container has the disk. Errors: ErrInvalidArgument for a name or a path that no disk can have,
// ErrAlreadyExists if another disk has the name, ErrFailedPrecondition if the container does not run or the device is in
// use, ErrResourceExhausted, ErrNotImplemented. DetachDisk does not wait until the guest has stopped using the disk. It
// returns ErrNotFound if AttachDisk has attached no disk of that name.
type DiskAttacher interface {
	AttachDisk(ctx context.Context, p *Pod, c *Container, d Disk) error
	DetachDisk(ctx context.Context, p *Pod, c *Container, name string) error
}

// Disk is a block device of the node that a machine gets as a disk.
type Disk struct {
	// Name is the disk's serial number in the guest.
	Name string
	// Path is absolute.
	Path     string
	ReadOnly bool
}

// PodUpdater changes the resources of a whole pod in place, for backends that limit pods apart from their containers.
// p.Config already holds the new resources and overhead, merged with the old ones. If the pod is a unit pod, the node
// instead calls UpdateContainer. If UpdateSandbox fails, the node calls it again with the old resources, unless the error
// is ErrMemoryKept.
type PodUpdater interface {
	UpdateSandbox(ctx context.Context, p *Pod) error
}

// Specifier is for backends whose containers have an OCI specification. They honour Container.Adjustment.
//
// CreateSpecified is CreateContainer for a container that plugins of the node may adjust. It calls adjust with the container's
// specification before it writes it, unless the container exists already. It makes the container that adjust returns, which is c
// if nothing is to change.
//
// Spec returns the specification of a created container at any time. It returns errdefs.ErrNotFound for a container that has not
// been created, or has been removed.
type Specifier interface {
	CreateSpecified(ctx context.Context, p *Pod, c *Container, adjust func(context.Context, *specs.Spec) (*Container, error)) (Resolved, error)
	Spec(p *Pod, c *Container) (*specs.Spec, error)
}

// StatsProvider measures containers and pods. The node adds the identity and the network statistics.
type StatsProvider interface {
	// ContainerStats returns a container's statistics (cpu, memory, swap, writable layer …). The caller adds the
	// container's attributes.
	ContainerStats(ctx context.Context, p *Pod, c *Container) (*runtimeapi.ContainerStats, error)
	// ContainerSamples is like ContainerStats. If the container runs, it also returns a sample of each metric that the
	// backend knows, except those of the network and those that follow from the container's configuration.
	ContainerSamples(ctx context.Context, p *Pod, c *Container) (*runtimeapi.ContainerStats, stats.Samples, error)
	// PodStats returns the cpu, memory, io and process statistics of the whole pod.
	PodStats(ctx context.Context, p *Pod) (*runtimeapi.LinuxPodSandboxStats, error)
}

// Readier is for backends with a dependency, such as another daemon, that may disappear while the node is up.
type Readier interface {
	// Ready returns nil if pods can be created and started, otherwise an error with the reason. It does not wait. Even
	// if Ready returns an error, the backend receives orders, because many orders do not need the dependency.
	Ready() error
}

// Inspector adds facts to verbose status answers. The facts share one JSON object with the node's facts (handler,
// state, config …). Keys are camel case. All kinds of pod use the same key for the same fact: pid, cgroup, runDir,
// sandboxID.
type Inspector interface {
	Inspect(ctx context.Context, p *Pod, c *Container) (map[string]any, error)
}
