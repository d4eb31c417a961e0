package sandbox

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod is what a backend is told of a pod: identity, configuration and network, never its state.
// It is immutable once handed over.
type Pod struct {
	// ID is the sandbox ID: 64 lower-case hex digits, or component#n for a unit pod that runs a component.
	ID string
	// Handler is the RuntimeClass handler that chose the backend.
	Handler string
	// Config is the message of RunPodSandbox.
	Config *runtimeapi.PodSandboxConfig
	// Netns is the path of the pod's network namespace; empty when the pod uses the host's.
	Netns string
	// IPs are the pod's addresses, the primary one first; empty on host network.
	IPs []netip.Addr
}

// Container is what a backend is told of a container. It is immutable once handed over.
type Container struct {
	// ID is the container ID. That of a unit pod is the pod's, whichever attempt it is: the attempts follow each other
	// in one place, and the node keeps their records apart.
	ID string
	// Config is the message of CreateContainer, with the resources of the last UpdateContainerResources.
	Config *runtimeapi.ContainerConfig
	// ImageID is the image that Config.Image named when the container was created (Image.id of the CRI).
	ImageID string
}

// Backend makes, runs and removes the pods of one kind of isolation. Implementations: internal/sandbox/linux, internal/sandbox/wasm, internal/sandbox/vm,
// test/fake.
//
// Every method may be called from many goroutines, but the node never has two orders under way for the same
// container, except that StopContainer may arrive again, with a shorter grace, while an earlier one waits.
// A method returns soon after its context ends, with what it began left in a state that its repeat, or the
// matching removal, can handle. Errors carry an errdefs class; an error without one is an internal fault.
type Backend interface {
	// Capabilities tells what the backend can do; constant over its life.
	Capabilities() Capabilities

	// Validate refuses, without any effect, what the backend cannot honour: errdefs.ErrInvalidArgument or
	// errdefs.ErrNotImplemented naming the field. c is nil when the sandbox itself is asked for.
	Validate(p *Pod, c *Container) error

	// CreateSandbox makes what the pod's containers will share (pinned namespaces, cgroup, /dev/shm …).
	// The pod's network is up when it is called.
	CreateSandbox(ctx context.Context, p *Pod) error
	// StopSandbox releases what CreateSandbox made that lives or holds the network namespace, once the pod's
	// containers are stopped.
	StopSandbox(ctx context.Context, p *Pod) error
	// RemoveSandbox removes every trace of the pod, half-made ones included. Its containers are removed already.
	RemoveSandbox(ctx context.Context, p *Pod) error

	// CreateContainer prepares a container (root filesystem, bundle, definition) without running anything of it.
	CreateContainer(ctx context.Context, p *Pod, c *Container) (Resolved, error)
	// StartContainer returns once the container runs and, for servers that the backend can probe, is ready.
	// It also starts a container that has stopped. A program that cannot be started is an error whose class is
	// errdefs.ErrFailedPrecondition or ErrInvalidArgument; Status then tells StartError and the exit code.
	StartContainer(ctx context.Context, p *Pod, c *Container) error
	// StopContainer asks the container to end, forces it after grace (0: at once) and returns when it is dead.
	// An end of ctx stops the waiting, not the container.
	StopContainer(ctx context.Context, p *Pod, c *Container, grace time.Duration) error
	// RemoveContainer removes every trace of the container; what still runs of it is killed.
	RemoveContainer(ctx context.Context, p *Pod, c *Container) error
	// Status tells what there is of the container now. Not being there is StateAbsent, not an error.
	Status(ctx context.Context, p *Pod, c *Container) (Status, error)

	// Recover is called once, before any other method but Capabilities. It re-adopts what of known is still
	// there, removes what carries this backend's mark and is not in known, and from then on reports to sink. While it
	// is ErrAway, the backend takes no orders, and Recover is called again.
	Recover(ctx context.Context, known []Known, sink Sink) (Found, error)
}

// ErrAway is Recover's error while something that the backend stands on, another daemon for instance, is not there.
var ErrAway = errors.New("the backend waits for it")

// Capabilities is what the node and the control planes must know of a backend in advance.
type Capabilities struct {
	// MaxContainers is how many containers a pod may have at a time; 0 is unlimited, 1 makes unit pods, whose state is
	// the pod's own and whose container a backend knows by the pod's ID.
	MaxContainers int
	// Components says that pods may be named by component labels and get component#n as ID.
	Components bool
	// HostNetwork says that pods may use the node's own network namespace.
	HostNetwork bool
	// RecursiveReadOnlyMounts, MountOptions (noexec, nodev, nosuid), UserNamespaces and SupplementalGroupsPolicy are
	// reported by the CRI's Status.
	RecursiveReadOnlyMounts  bool
	MountOptions             bool
	UserNamespaces           bool
	SupplementalGroupsPolicy bool
}

// Unit reports whether the backend's pods are unit pods.
func (c Capabilities) Unit() bool { return c.MaxContainers == 1 }

// Resolved is what only the backend could find out of a container's configuration; the node keeps it in the record.
type Resolved struct {
	// User is the identity of the first process (CRI ContainerStatus.user); nil when the backend has no such thing.
	User *runtimeapi.ContainerUser
	// Mounts are the mounts as made, image volumes with their image reference (CRI ContainerStatus.mounts).
	Mounts []*runtimeapi.Mount
	// StopSignal is the signal in force, from the request or from the image.
	StopSignal runtimeapi.Signal
	// Component is the name of the component that the container runs (domain:server@version), as derived from its
	// image by a backend whose pods need no component labels; empty when the labels give it, or there is none.
	Component string
	// SwapLimited says that a container with a memory limit and no limit of swap may not swap: memory and swap together are
	// bounded by the memory limit.
	SwapLimited bool
}

// State is what a backend sees of a container.
type State int

// The states that a backend can see.
const (
	// StateAbsent: nothing of it is there.
	StateAbsent State = iota
	// StateCreated: prepared, nothing runs.
	StateCreated
	// StateRunning: it runs.
	StateRunning
	// StateExited: it ran, or failed to start, and ended.
	StateExited
)

// Exit reasons of a container (CRI ContainerStatus.reason).
const (
	ReasonCompleted  = "Completed"
	ReasonError      = "Error"
	ReasonOOMKilled  = "OOMKilled"
	ReasonStartError = "StartError"
	// ReasonGuestPanic is for a virtual machine whose kernel reported a panic.
	ReasonGuestPanic = "GuestPanic"
	// ReasonNoBootableDevice is for a virtual machine whose firmware found nothing that it could boot.
	ReasonNoBootableDevice = "NoBootableDevice"
	// ReasonUnknown is for a container whose end nobody saw (a reboot of the node, a helper that was killed).
	ReasonUnknown = "Unknown"
)

// Exit codes that are not the program's own.
const (
	// ExitStartError is the code of a container whose program could not be started.
	ExitStartError = 128
	// ExitKilled is the code of a container that was ended by force, 128 + SIGKILL.
	ExitKilled = 137
	// ExitUnknown is the code of a container whose end nobody saw.
	ExitUnknown = 255
)

// Status is what there is of a container.
type Status struct {
	State      State
	Pid        int
	StartedAt  time.Time
	FinishedAt time.Time
	ExitCode   int32
	// Reason is one of the Reason constants; Message says more, for a person.
	Reason  string
	Message string
}

// Event reports what happened without an order: a container ended, or, when ContainerID is empty, the sandbox
// itself can no longer be used (its init process or machine is gone).
type Event struct {
	PodID       string
	ContainerID string
	Status      Status
}

// Sink takes events; it does not block and may be called from any goroutine.
type Sink func(Event)

// Known is one pod of the record, with its containers, as Recover is told of it.
type Known struct {
	Pod        *Pod
	Containers []*Container
}

// Found is Recover's answer: what there is of the known pods.
type Found struct {
	// Sandboxes holds the IDs of pods whose shared parts are all there.
	Sandboxes map[string]bool
	// Containers holds a Status per container ID; one that is missing is absent.
	Containers map[string]Status
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

// AttachRequest joins the stdio of a running container.
type AttachRequest struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	TTY    bool
	Resize <-chan TermSize
}

// TermSize is the size of a terminal in characters.
type TermSize struct{ Width, Height uint16 }

// Execer is a backend whose containers can run further programs. Exec returns the program's exit code, also when
// it is not 0; the error is for programs that could not be run or watched. An end of ctx kills the program.
// When the program has ended but a child of it holds its stdio, Exec returns after a drain deadline.
type Execer interface {
	Exec(ctx context.Context, p *Pod, c *Container, req ExecRequest) (exitCode int32, err error)
}

// Attacher is a backend whose containers' stdio can be joined. Attach returns when the container ends, the client
// goes away or ctx ends.
type Attacher interface {
	Attach(ctx context.Context, p *Pod, c *Container, req AttachRequest) error
}

// Dialer is a backend whose pods are not reached from inside their network namespace, since what listens there is
// elsewhere: in a guest. network and address are net.Dialer's; a loopback address is the guest's own. Without it the node
// dials in the namespace. Nobody listening, or nobody there to ask, is errdefs.ErrUnavailable; c is nil where the pod has no
// running container.
type Dialer interface {
	Dial(ctx context.Context, p *Pod, c *Container, network, address string) (net.Conn, error)
}

// Channeler is a backend whose containers can have channels (AnnotationChannels). Channels returns a connection for them,
// on which both sides speak as internal/channel describes. A later connection of the same container replaces this one, and
// the container opens its channels again on it. Containers of the same non-empty group deliver to each other themselves. The
// connection ends with the container; its caller closes it.
//
// Errors: ErrFailedPrecondition when the container does not run or has no channels, ErrUnavailable when what runs it does
// not answer.
type Channeler interface {
	Channels(ctx context.Context, p *Pod, c *Container) (conn net.Conn, group string, err error)
}

// LogReopener is a backend that writes CRI log files and can be told that they were rotated.
type LogReopener interface {
	ReopenLog(ctx context.Context, p *Pod, c *Container) error
}

// Updater is a backend that can change the resources of a created or running container in place.
// c.Config carries the merged new resources already.
type Updater interface {
	UpdateContainer(ctx context.Context, p *Pod, c *Container) error
}

// StatsProvider is a backend that can measure its containers and pods. The node adds identity and network figures.
type StatsProvider interface {
	// ContainerStats fills cpu, memory, swap, writable layer … of a container; attributes are the caller's.
	ContainerStats(ctx context.Context, p *Pod, c *Container) (*runtimeapi.ContainerStats, error)
	// PodStats fills cpu, memory, io and process figures of the whole pod.
	PodStats(ctx context.Context, p *Pod) (*runtimeapi.LinuxPodSandboxStats, error)
}

// Readier is a backend that stands on something that may go away while the node is up, another daemon for instance.
type Readier interface {
	// Ready tells, without waiting, why new pods cannot be made or started now; nil when they can. Orders still reach the
	// backend, since much can be done without: it answers them itself.
	Ready() error
}

// Inspector is a backend with more to say for verbose status calls. Its facts stand beside the node's (handler, state, config and
// so on) in one JSON object, so keys are in camel case, and those that several kinds of pod have are spelled alike: pid, cgroup,
// runDir, sandboxID.
type Inspector interface {
	Inspect(ctx context.Context, p *Pod, c *Container) (map[string]any, error)
}
