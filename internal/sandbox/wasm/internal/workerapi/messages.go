package workerapi

import (
	"encoding/json"
	"os"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// Version is the version of the protocol. Within a version, fields may be added only; a reader ignores fields that it does not
// know. A daemon that finds a worker of another version ends that worker and its pods, with a reason.
const Version = 1

// HeaderContainer is the HTTP header of requests on the data socket with the ID of the pod that they are for.
const HeaderContainer = "Tripod-Container"

// HeaderPeer is the HTTP header of requests on the data socket with the address of their client, IP:port.
const HeaderPeer = "Tripod-Peer"

// MaxMessage is the longest message in bytes: descriptors, TLS material and environment of one pod fit easily.
const MaxMessage = 32 << 20

// message is the content of a frame (internal/fdpass).
type message struct {
	ID    uint64          `json:"id,omitempty"` // of the request; 0 makes an event
	Op    string          `json:"op,omitempty"` // of requests and events
	Body  json.RawMessage `json:"body,omitempty"`
	Error *Error          `json:"error,omitempty"` // of replies
}

// Operations and events.
const (
	opHello     = "hello"
	opLoad      = "load"
	opUnload    = "unload"
	opStart     = "start"
	opStop      = "stop"
	opKill      = "kill"
	opRemove    = "remove"
	opList      = "list"
	opStats     = "stats"
	opAttach    = "attach"
	opReopenLog = "reopen-log"
	opUpdateTLS = "update-tls"
	opUpdate    = "update"
	opMetrics   = "metrics"
	opChannels  = "channels"

	eventExited = "exited"
	eventSpans  = "spans"
)

// Hello describes a worker. Its format is the same in all versions of the protocol.
type Hello struct {
	// Version is the worker's version of the protocol.
	Version int `json:"version"`
	// Program is the version of tripod-wasm, Engine the fingerprint of its engine and configuration. Load refuses code that was
	// compiled under another fingerprint.
	Program string `json:"program"`
	Engine  string `json:"engine"`
	// Name is that of WorkerConfig. Pid is the process ID in the daemon's PID namespace, whose /proc the worker starts with.
	Name      string    `json:"name"`
	Pid       int       `json:"pid"`
	StartedAt time.Time `json:"startedAt"`
}

type helloRequest struct {
	Version int  `json:"version"`
	Events  bool `json:"events"` // send events on this connection
}

// Code is a compiled component and its services.
type Code struct {
	// Digest is its name in PodSpec. The same code with other descriptors needs another name.
	Digest string `json:"digest"`
	// Image is the file that `tripod-wasm compile` wrote; it is read from its beginning.
	Image File `json:"image"`
	// Descriptors is a serialized google.protobuf.FileDescriptorSet with all imports. Services are those of its services that
	// the component serves; empty: those of the files that no other file of the set imports. Metadata, a serialized Metadata
	// message, replaces Descriptors in images of Vimana's layout. All three are for the gRPC world; others ignore them.
	Descriptors []byte   `json:"descriptors,omitempty"`
	Metadata    []byte   `json:"metadata,omitempty"`
	Services    []string `json:"services,omitempty"`
}

// Loaded describes code that a worker has loaded.
type Loaded struct {
	Digest string    `json:"digest"`
	World  wit.World `json:"world"`
	// Procedures are the gRPC methods, as "/package.Service/Method".
	Procedures []string `json:"procedures,omitempty"`
	// Exports and Imports name the functions of the component.
	Exports []string `json:"exports"`
	Imports []string `json:"imports"`
	// Apart says why the component must not share a worker with other pods; empty if it may. The memory that its answers take in
	// the worker has no bound.
	Apart string `json:"apart,omitempty"`
}

// PodSpec is all that a worker needs to run a pod. The sender sets Files to *os.File, which it still has to close; the receiver
// gets its own.
type PodSpec struct {
	ID string `json:"id"`
	// Component names the component in logs, metrics and traces.
	Component string `json:"component"`
	// Digest is that of the loaded code.
	Digest string   `json:"digest"`
	Args   []string `json:"args,omitempty"` // the first is the program's name
	Env    []string `json:"env,omitempty"`  // KEY=value
	Mounts []Mount  `json:"mounts,omitempty"`

	Resources Resources `json:"resources"`
	Limits    Limits    `json:"limits"`
	Holdings  Holdings  `json:"holdings"`

	// Ports are the sockets of servers; a command has none.
	Ports []Port `json:"ports,omitempty"`
	// TLS is needed as soon as there is a TLS or QUIC port.
	TLS *TLS `json:"tls,omitempty"`

	// Log is the container's log, opened for appending; nil: no log.
	Log File `json:"log"`
	// Stdin gives the guest a standard input that attached clients write to; StdinOnce closes it when the first of them
	// is done. Without Stdin the guest reads end of file. TTY joins stderr to stdout.
	Stdin     bool `json:"stdin,omitempty"`
	StdinOnce bool `json:"stdinOnce,omitempty"`
	TTY       bool `json:"tty,omitempty"`

	// Channels are the channels of a module of the edge front door; a guest that has any finds them under /ch. Client.Channels
	// carries their messages.
	Channels []channel.Channel `json:"channels,omitempty"`
}

// File is a file of a request. Over the wire it is the number of one that travels with the frame; a nil one is none.
type File struct {
	*os.File `json:"-"`
	Index    *int `json:"fd,omitempty"`
}

// Mount makes a directory or file of the node visible to the guest.
type Mount struct {
	// Guest is the absolute path that the guest sees.
	Guest    string `json:"guest"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// Dir is the directory (O_PATH|O_DIRECTORY does). Files are mounted through their directory.
	Dir File `json:"dir"`
}

// Kinds of Port.
const (
	PortTLS       = "tls"       // TCP: HTTP/2 and HTTP/1.1 over TLS
	PortQUIC      = "quic"      // UDP: HTTP/3
	PortCleartext = "cleartext" // TCP: HTTP/1.1 and HTTP/2 with prior knowledge
)

// Port is an open socket: listening for TCP, bound for QUIC.
type Port struct {
	Kind   string `json:"kind"`
	Socket File   `json:"socket"`
}

// Resources are limits of a pod as a whole; 0 is unlimited.
type Resources struct {
	// MemoryBytes bounds the linear memories and tables of all instances of the pod together.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// CPUQuota of each CPUPeriod may be used by guests, both in microseconds, as in cgroups: 50000 of 100000 is half a CPU.
	CPUQuota  int64 `json:"cpuQuota,omitempty"`
	CPUPeriod int64 `json:"cpuPeriod,omitempty"`
}

// Holdings bound what the guests of a pod may hold of their worker, all its instances together; 0 is unlimited. The files of
// all pods together are bounded by half of the worker's RLIMIT_NOFILE in any case, and those of one by a quarter of that.
type Holdings struct {
	// Files are open files and directories, those that are mounted included, once per instance. One too many is an error
	// of the guest's open: EMFILE in preview 1, quota in WASI 0.2.
	Files int64 `json:"files,omitempty"`
	// Handles are resources of the host: streams, timers, fields. One too many ends the request.
	Handles int64 `json:"handles,omitempty"`
	// HostBytes is what the worker keeps for handles, in bytes: headers, paths, responses that are not sent yet.
	HostBytes int64 `json:"hostBytes,omitempty"`
}

// Limits are limits of one request, or on requests; 0 takes the default.
type Limits struct {
	// RequestTimeout bounds the computing of a request, between two messages for streams, and the whole of a unary call whose
	// client set no deadline: a guest that stands back for others takes long. Default 30 s. To wait, for a timer or for the
	// client, is not computing.
	RequestTimeout time.Duration `json:"requestTimeout,omitempty"`
	// MaxMessageBytes bounds a gRPC message of a request; default 4 MiB. Answers are bounded by the engine (MaxValue).
	MaxMessageBytes int64 `json:"maxMessageBytes,omitempty"`
	// Concurrency is how many requests a pod serves at a time; default 64.
	Concurrency int `json:"concurrency,omitempty"`
	// Reuse lets an instance serve more than one request, one after the other.
	Reuse bool `json:"reuse,omitempty"`
}

// Defaults of Limits.
const (
	DefaultRequestTimeout  = 30 * time.Second
	DefaultMaxMessageBytes = 4 << 20
	DefaultConcurrency     = 64
)

// TLS is the server's identity, all in PEM.
type TLS struct {
	Certificate []byte `json:"certificate"` // the chain, the leaf first
	Key         []byte `json:"key"`
	// ClientCAs, when there are any, are the authorities that a client certificate is verified against, when the client
	// brings one; RequireClient refuses clients that bring none.
	ClientCAs     []byte `json:"clientCAs,omitempty"`
	RequireClient bool   `json:"requireClient,omitempty"`
}

// States of a pod in a worker.
const (
	StateRunning = "running"
	StateExited  = "exited"
)

// Status is what there is of a pod. A pod is there from Start, also one that fails, until Remove.
type Status struct {
	ID         string    `json:"id"`
	Component  string    `json:"component"`
	Digest     string    `json:"digest"`
	State      string    `json:"state"`
	StartedAt  time.Time `json:"startedAt"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	// ExitCode, Reason (one of package sandbox's) and Message are of a pod that has exited.
	ExitCode int32  `json:"exitCode"`
	Reason   string `json:"reason,omitempty"`
	Message  string `json:"message,omitempty"`
}

// Stats are figures of one pod since its start.
type Stats struct {
	ID   string    `json:"id"`
	Time time.Time `json:"time"`
	// CPUNanos is the CPU time that its guests have used.
	CPUNanos uint64 `json:"cpuNanos"`
	// MemoryBytes are the linear memories and tables of the live instances, PeakBytes the most there were.
	MemoryBytes uint64 `json:"memoryBytes"`
	PeakBytes   uint64 `json:"peakBytes"`
	// ThrottledNanos is how long guests have waited for CPU quota.
	ThrottledNanos uint64 `json:"throttledNanos"`
	Instances      int    `json:"instances"` // live now
	// Holdings are what the guests hold now.
	Holdings    Holdings `json:"holdings"`
	Active      int      `json:"active"` // requests being served now
	Requests    uint64   `json:"requests"`
	Traps       uint64   `json:"traps"`
	Timeouts    uint64   `json:"timeouts"`   // guests ended at their deadline
	OutOfMemory uint64   `json:"oom"`        // guests ended at their memory limit
	LogDropped  uint64   `json:"logDropped"` // bytes of output that could not be written to the log
	// ChannelDropped is how many messages of channels were lost: for the daemon, while it was away, or for a guest that does
	// not read.
	ChannelDropped uint64 `json:"channelDropped,omitempty"`
	// Connections are open now. Rejected counts those that were refused or closed early, by connlimit's reasons.
	Connections int               `json:"connections,omitempty"`
	Rejected    map[string]uint64 `json:"rejected,omitempty"`
}

// Metrics are counters of one pod by method.
type Metrics struct {
	ID        string          `json:"id"`
	Component string          `json:"component"`
	Methods   []MethodMetrics `json:"methods,omitempty"`
}

// MethodMetrics are the counters of one gRPC procedure, or of "HTTP" for the wasi:http world.
type MethodMetrics struct {
	Procedure     string `json:"procedure"`
	InFlight      int64  `json:"inFlight"`
	ReceivedBytes uint64 `json:"receivedBytes"`
	SentBytes     uint64 `json:"sentBytes"`
	// Codes counts the answers by their gRPC code in its canonical spelling ("OK", "INTERNAL"), or HTTP status ("200").
	Codes map[string]uint64 `json:"codes"`
	// Buckets counts answers by duration: Buckets[i] took at most Bounds[i] seconds and more than the bound before; the last
	// bucket has no bound. Not cumulative.
	Bounds  []float64 `json:"bounds"`
	Buckets []uint64  `json:"buckets"`
	// Seconds is the sum of the durations.
	Seconds float64 `json:"seconds"`
}

// Event is what a worker tells unasked; one field is set.
type Event struct {
	// Exited is a pod that has ended, in whatever way.
	Exited *Status
	// Spans is a serialized opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest.
	Spans []byte
}

type idRequest struct {
	ID    string        `json:"id"`
	Grace time.Duration `json:"grace,omitempty"`
}

type fileRequest struct {
	ID   string `json:"id"`
	File File   `json:"file"`
}

type channelsRequest struct {
	ID   string `json:"id"`
	Conn File   `json:"conn"`
}

type tlsRequest struct {
	ID  string `json:"id"`
	TLS TLS    `json:"tls"`
}

// Update changes limits of a running pod; nil leaves as it is.
type Update struct {
	ID        string     `json:"id"`
	Resources *Resources `json:"resources,omitempty"`
	Limits    *Limits    `json:"limits,omitempty"`
}

type idsRequest struct {
	IDs []string `json:"ids,omitempty"`
}
