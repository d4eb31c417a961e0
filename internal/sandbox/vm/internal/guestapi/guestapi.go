package guestapi

import (
	"net/netip"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// The paths in a guest. Shared is the mount point of the share ShareTag, which has the pod's volumes.
const (
	Shared   = "/run/tripod/shared"
	ShareTag = "share0"
	// Logs is the pod's log directory in the guest, on the scratch disk.
	Logs = "/scratch/logs"
	// ScratchSerial is the serial number of the scratch disk, an empty one.
	ScratchSerial = "scratch0"
)

// Method names a call.
type Method string

// The methods, with the types of their bodies and answers. All but Log and Events are those of sandbox.Backend and its
// optional interfaces.
const (
	// MethodSetup prepares the guest for its pod: Setup. It can be repeated.
	MethodSetup Method = "setup"
	// MethodFreeze prepares a guest without a pod for machine.Driver.Save: it writes what is not on the scratch disk yet, and
	// frees memory.
	MethodFreeze Method = "freeze"
	// MethodSync writes what the containers have written to the pod's volumes.
	MethodSync Method = "sync"
	// MethodTrim gives the room of deleted files on the scratch disk back to the node.
	MethodTrim Method = "trim"
	// MethodClock: Clock. If Behind is 0, the answer is a Clock with Now, otherwise the guest's clock is corrected.
	MethodClock Method = "clock"
	// MethodCreate: Create → sandbox.Resolved.
	MethodCreate Method = "create"
	// MethodStart → sandbox.Status. MethodStop (Stop), MethodRemove → nothing.
	MethodStart  Method = "start"
	MethodStop   Method = "stop"
	MethodRemove Method = "remove"
	// MethodStatuses → the statuses of all containers by their IDs: map[string]sandbox.Status.
	MethodStatuses Method = "statuses"
	// MethodUpdate: Container. MethodUpdatePod: Pod.
	MethodUpdate    Method = "update"
	MethodUpdatePod Method = "update-pod"
	// MethodStats → runtimeapi.ContainerStats. MethodPodStats → runtimeapi.LinuxPodSandboxStats.
	MethodStats    Method = "stats"
	MethodPodStats Method = "pod-stats"
	// MethodSamples → Figures.
	MethodSamples Method = "samples"
	// MethodExec and MethodAttach carry the program's stdin, stdout and stderr, and the sizes of its terminal. The result
	// has the exit code.
	MethodExec   Method = "exec"
	MethodAttach Method = "attach"
	// MethodLog sends the container's log in the CRI's format, from Request.Offset on, until the log is complete. The body
	// is a sequence of Ack: the offset up to which the daemon has the log, so that the guest can drop it.
	MethodLog Method = "log"
	// MethodEvents sends an Event for each container that has ended, and one for each container that is running, when the
	// call begins; after that one for each container that ends.
	MethodEvents Method = "events"
)

// Request begins a call.
type Request struct {
	Method Method `json:"method"`
	// Container is the container's ID.
	Container string `json:"container,omitempty"`
	// Cmd, TTY, Stdin, Stdout and Stderr are those of sandbox.ExecRequest and sandbox.AttachRequest.
	Cmd    []string `json:"cmd,omitempty"`
	TTY    bool     `json:"tty,omitempty"`
	Stdin  bool     `json:"stdin,omitempty"`
	Stdout bool     `json:"stdout,omitempty"`
	Stderr bool     `json:"stderr,omitempty"`
	// Offset is the number of bytes of the log that the daemon has.
	Offset int64 `json:"offset,omitempty"`
}

// Setup describes the pod.
type Setup struct {
	Pod        Pod         `json:"pod"`
	Interfaces []Interface `json:"interfaces"`
	// Now is the node's time.
	Now time.Time `json:"now"`
	// Seed is random data from the node, identity.SeedSize bytes. Guests that continue from the same template would otherwise have the
	// same random numbers.
	Seed []byte `json:"seed"`
}

// Clock is the time of a guest, and how far its clock is behind the node's.
type Clock struct {
	Now    time.Time     `json:"now,omitzero"`
	Behind time.Duration `json:"behind,omitempty"`
}

// Figures are the statistics and samples of a container.
type Figures struct {
	Stats   *runtimeapi.ContainerStats `json:"stats"`
	Samples []Sample                   `json:"samples"`
}

// Sample is a stats.Sample of the family with that name.
type Sample struct {
	Family string   `json:"family"`
	Value  float64  `json:"value"`
	Labels []string `json:"labels,omitempty"`
}

// Interface is a network interface of the guest, which finds it by its MAC address.
type Interface struct {
	Name   string         `json:"name"`
	MAC    string         `json:"mac"`
	MTU    int            `json:"mtu"`
	Addrs  []netip.Prefix `json:"addrs"`
	Routes []Route        `json:"routes"`
}

// Route is a route through the gateway Via, or directly on the link if Via is not valid.
type Route struct {
	Dst    netip.Prefix `json:"dst"`
	Via    netip.Addr   `json:"via,omitzero"`
	Metric int          `json:"metric,omitempty"`
}

// Create describes a container and the disks that it needs.
type Create struct {
	Container Container `json:"container"`
	Images    []Image   `json:"images"`
	Devices   []Device  `json:"devices,omitempty"`
}

// Device is a block device of a container: the one with this index in the container's configuration is the disk with this
// number at the guest's SCSI controller.
type Device struct {
	Index int `json:"index"`
	LUN   int `json:"lun"`
}

// Image is an image whose root file system is on a disk.
type Image struct {
	image.Image
	// LUN is the disk's number at the guest's SCSI controller.
	LUN int `json:"lun"`
}

// Stop is the body of MethodStop.
type Stop struct {
	Grace time.Duration `json:"grace"`
}

// Ack is an element of the body of MethodLog.
type Ack struct {
	Offset int64 `json:"offset"`
}

// Event is the status of a container. It is sandbox.Event without the pod.
type Event struct {
	Container string         `json:"container"`
	Status    sandbox.Status `json:"status"`
}
