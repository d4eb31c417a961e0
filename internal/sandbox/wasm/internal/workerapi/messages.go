package workerapi

import (
	"encoding/json"
	"os"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/fdpass"
)

// Version is the version of the protocol. Within a version, fields can only be added; a reader ignores unknown fields.
// A daemon that finds a worker of another version ends the worker and its pods, and reports why.
const Version = 1

// HeaderContainer is the HTTP header with the ID of the requested pod, in requests on the data socket.
const HeaderContainer = "Tripod-Container"

// HeaderPeer is the HTTP header with the client's address (IP:port), in requests on the data socket.
const HeaderPeer = "Tripod-Peer"

// MaxMessage is the maximum length of a message, in bytes. The descriptors, TLS material and environment of one pod
// easily fit.
const MaxMessage = 32 << 20

// message is the content of a frame (internal/fdpass).
type message struct {
	ID    uint64          `json:"id,omitempty"` // request number; 0 in events
	Op    string          `json:"op,omitempty"` // in requests and events
	Body  json.RawMessage `json:"body,omitempty"`
	Error *fdpass.Error   `json:"error,omitempty"` // in replies
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
	opDialer    = "dialer"
	opUpdate    = "update"
	opMetrics   = "metrics"
	opProfile   = "profile"
	opChannels  = "channels"

	eventExited   = "exited"
	eventFallback = "fallback"
	eventSpans    = "spans"
)

// Hello describes a worker. Its format is the same in all versions of the protocol.
type Hello struct {
	Version int `json:"version"` // of the protocol
	// Program is the version of tripod-wasm. Engine is the fingerprint of the worker's engine and of the engine's
	// configuration. Load refuses code that was compiled for another fingerprint.
	Program string `json:"program"`
	Engine  string `json:"engine"`
	// Name is WorkerConfig.Name. Pid is the process ID in the daemon's PID namespace.
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
	// Digest identifies the code in PodSpec. The same code with other descriptors needs another digest.
	Digest string `json:"digest"`
	// Image is the output file of `tripod-wasm compile`. It is read from offset 0.
	Image File `json:"image"`
	// Quick says that the code is not optimised (CompileConfig.Quick). A worker that has it takes optimised code with the same
	// digest instead: instances that begin later run that.
	Quick bool `json:"quick,omitempty"`
	// Descriptors is a serialized google.protobuf.FileDescriptorSet with all imports. Services are the services in
	// Descriptors that the component serves. If Services is empty, the component serves all services in those files of
	// the set that no other file imports. For images in Vimana's layout, Metadata (a serialized Metadata message)
	// replaces Descriptors. Only the gRPC world uses these three fields.
	Descriptors []byte   `json:"descriptors,omitempty"`
	Metadata    []byte   `json:"metadata,omitempty"`
	Services    []string `json:"services,omitempty"`
}

// Loaded describes code that a worker has loaded.
type Loaded struct {
	Digest     string    `json:"digest"`
	World      wit.World `json:"world"`
	Procedures []string  `json:"procedures,omitempty"` // gRPC methods, as "/package.Service/Method"
	Exports    []string  `json:"exports"`              // names of the exported functions
	Imports    []string  `json:"imports"`              // names of the imported functions
	// OwnWorkerReason is empty if the component can share a worker with other pods. Otherwise, the component's
	// responses can use unbounded memory in the worker, and OwnWorkerReason says why.
	OwnWorkerReason string `json:"apart,omitempty"`
	// Quick says that instances run code that is not optimised.
	Quick bool `json:"quick,omitempty"`
}

// PodSpec is everything that a worker needs to run a pod. The sender keeps ownership of the Files; the receiver gets
// duplicates.
type PodSpec struct {
	ID string `json:"id"`
	// Component names the component in logs, metrics and traces.
	Component string   `json:"component"`
	Digest    string   `json:"digest"`         // of the loaded code (Code.Digest)
	Args      []string `json:"args,omitempty"` // the first is the program's name
	Env       []string `json:"env,omitempty"`  // KEY=value
	Mounts    []Mount  `json:"mounts,omitempty"`

	Resources Resources `json:"resources"`
	Limits    Limits    `json:"limits"`
	Holdings  Holdings  `json:"holdings"`

	Ports []Port `json:"ports,omitempty"` // a server's sockets; a command has none
	TLS   *TLS   `json:"tls,omitempty"`   // required for a TLS or QUIC port
	CORS  CORS   `json:"cors,omitzero"`

	Egress *Egress `json:"egress,omitempty"` // nil for a guest that may not call out
	// KeyValue is the URL of the store for wasi:keyvalue, by package redis; "" for no store.
	KeyValue string `json:"keyValue,omitempty"`
	// NodeStore is the node's store for wasi:keyvalue, instead of KeyValue; nil for none.
	NodeStore *NodeStore `json:"nodeStore,omitempty"`

	Log File `json:"log"` // the container's log, opened for appending; nil for no log
	// Stdin connects the guest's standard input to attached clients; otherwise the guest reads end of file. StdinOnce
	// ends the guest's input when the first client has ended its input. TTY merges stderr into stdout.
	Stdin     bool `json:"stdin,omitempty"`
	StdinOnce bool `json:"stdinOnce,omitempty"`
	TTY       bool `json:"tty,omitempty"`

	// Channels are the channels of the guest. A guest with channels is a module of the MQTT front door. A core module
	// finds the channels under /ch; a component imports the interface in channels.wit. Client.Channels opens the
	// connection for the channels' messages.
	Channels []channel.Channel `json:"channels,omitempty"`
}

// File is a file in a request, or nil. On the wire it is an index into the descriptors passed with the frame.
type File struct {
	*os.File `json:"-"`
	Index    *int `json:"fd,omitempty"`
}

// Mount makes a directory of the node visible to the guest.
type Mount struct {
	// Guest is the absolute path that the guest sees.
	Guest    string `json:"guest"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// Config makes the directory's files values of wasi:config.
	Config bool `json:"config,omitempty"`
	// Blobs makes the directory keep the objects of wasi:blobstore. At most one mount does.
	Blobs bool `json:"blobs,omitempty"`
	// Dir is the directory, opened at least with O_PATH|O_DIRECTORY.
	Dir File `json:"dir"`
}

// Kinds of Port.
const (
	PortTLS       = "tls"       // TCP: HTTP/2 and HTTP/1.1 over TLS
	PortQUIC      = "quic"      // UDP: HTTP/3
	PortCleartext = "cleartext" // TCP: HTTP/1.1 and HTTP/2 with prior knowledge
)

// Port is an open socket: a listening socket for TCP, or a bound socket for QUIC.
type Port struct {
	Kind   string `json:"kind"`
	Socket File   `json:"socket"`
}

// Egress is how the guests of a pod call out.
type Egress struct {
	// Dialer is the pod's connection to the node's dialer (package egress), and Roots a PEM file with the authorities
	// that guests trust.
	Dialer File `json:"dialer"`
	Roots  File `json:"roots"`
}

// NodeStore is the store of a namespace on the node (package pairs).
type NodeStore struct {
	Dir File `json:"dir"` // opened at least with O_PATH|O_DIRECTORY
	// MaxBytes and MaxKeys bound all pairs of the namespace.
	MaxBytes int64 `json:"maxBytes"`
	MaxKeys  int64 `json:"maxKeys"`
}

// Resources are the limits of a whole pod; 0 means unlimited.
type Resources struct {
	// MemoryBytes bounds the total size of the linear memories and tables of all instances of the pod.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// CPUQuota is the CPU time that guests can use in each CPUPeriod. Both are in microseconds, as in cgroups: a quota
	// of 50000 in a period of 100000 is half a CPU.
	CPUQuota  int64 `json:"cpuQuota,omitempty"`
	CPUPeriod int64 `json:"cpuPeriod,omitempty"`
}

// Holdings limit the resources that all instances of a pod together can hold in their worker; 0 means unlimited. In
// addition, the open files of all pods are limited to half of the worker's RLIMIT_NOFILE, and the open files of one pod
// to a quarter of that half.
type Holdings struct {
	// Files limits open files and directories. Each mounted directory counts once per instance. At the limit, the guest
	// cannot open more: it gets EMFILE in preview 1, and the error quota in WASI 0.2.
	Files int64 `json:"files,omitempty"`
	// Handles limits host resources: streams, timers, fields. A request that exceeds the limit is ended.
	Handles int64 `json:"handles,omitempty"`
	// HostBytes limits the memory, in bytes, that the worker uses for handles: headers, paths, unsent responses.
	HostBytes int64 `json:"hostBytes,omitempty"`
	// Sockets limits the connections that guests have opened, including idle ones. A further connection fails.
	Sockets int64 `json:"sockets,omitempty"`
}

// Limits apply to each request of a pod; 0 means the default.
type Limits struct {
	// RequestTimeout bounds the CPU time of a request or, if the method streams, the CPU time between two messages. It
	// also bounds the duration of a unary call whose client set no deadline, because a guest can wait long for its
	// share of the CPU. The default is 30 s. Waiting for a timer or the client uses no CPU time.
	RequestTimeout time.Duration `json:"requestTimeout,omitempty"`
	// MaxMessageBytes bounds a gRPC request message; default 4 MiB. The engine bounds responses (MaxValue).
	MaxMessageBytes int64 `json:"maxMessageBytes,omitempty"`
	// Concurrency is the number of requests that a pod serves at a time; default 64.
	Concurrency int `json:"concurrency,omitempty"`
	// Reuse lets an instance serve more than one request, one at a time.
	Reuse bool `json:"reuse,omitempty"`
	// ReuseRequests and ReuseAge bound the requests that an instance serves and its age. The defaults are 10,000 and ten
	// minutes.
	ReuseRequests int           `json:"reuseRequests,omitempty"`
	ReuseAge      time.Duration `json:"reuseAge,omitempty"`
	// Snapshot says when instances begin from a snapshot.
	Snapshot SnapshotMode `json:"snapshot,omitempty"`
}

// SnapshotMode says when the instances of a pod begin from a snapshot: a copy of the state that an instance has after its
// initialization.
type SnapshotMode string

const (
	// SnapshotAuto: unless the guest has seen during its initialization what each request must see for itself.
	SnapshotAuto SnapshotMode = ""
	// SnapshotAlways: even if it has asked for the time of day or random values, or has read files.
	SnapshotAlways SnapshotMode = "always"
	// SnapshotNever: each instance is initialized.
	SnapshotNever SnapshotMode = "never"
)

// SnapshotState describes the snapshot of a pod.
type SnapshotState struct {
	// Bytes is its memory, or 0 if there is none.
	Bytes int64 `json:"bytes,omitempty"`
	// Reason is why there will be none, or why it is without the component's warm-up, or "".
	Reason string `json:"reason,omitempty"`
}

// CORS says which web pages can call a server from a browser; without Origins none can.
type CORS struct {
	// Origins are patterns of package origin.
	Origins []string `json:"origins,omitempty"`
	// Credentials allows requests with cookies, HTTP authentication and client certificates.
	Credentials bool `json:"credentials,omitempty"`
}

// Defaults of Limits.
const (
	DefaultRequestTimeout  = 30 * time.Second
	DefaultMaxMessageBytes = 4 << 20
	DefaultConcurrency     = 64
	DefaultReuseRequests   = 10_000
	DefaultReuseAge        = 10 * time.Minute
)

// TLS is a server's TLS configuration, in PEM.
type TLS struct {
	Certificate []byte `json:"certificate"` // the chain, leaf first
	Key         []byte `json:"key"`
	// ClientCAs are the authorities for client certificates, or empty. RequireClient refuses clients without a
	// certificate.
	ClientCAs     []byte `json:"clientCAs,omitempty"`
	RequireClient bool   `json:"requireClient,omitempty"`
}

// States of a pod in a worker.
const (
	StateRunning = "running"
	StateExited  = "exited"
)

// Status describes a pod from its Start until Remove.
type Status struct {
	ID         string    `json:"id"`
	Component  string    `json:"component"`
	Digest     string    `json:"digest"`
	Quick      bool      `json:"quick,omitempty"` // it runs code that is not optimised
	State      string    `json:"state"`
	StartedAt  time.Time `json:"startedAt"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	// ExitCode, Reason (one of package sandbox's constants) and Message are set once the pod has exited.
	ExitCode int32  `json:"exitCode"`
	Reason   string `json:"reason,omitempty"`
	Message  string `json:"message,omitempty"`
}

// Stats are the statistics of one pod since its start.
type Stats struct {
	ID       string    `json:"id"`
	Time     time.Time `json:"time"`
	CPUNanos uint64    `json:"cpuNanos"` // CPU time of the pod's guests
	// MemoryBytes is the current size of the linear memories and tables of all instances. PeakBytes is the maximum of
	// MemoryBytes so far.
	MemoryBytes    uint64   `json:"memoryBytes"`
	PeakBytes      uint64   `json:"peakBytes"`
	ThrottledNanos uint64   `json:"throttledNanos"` // how long guests have waited for CPU quota
	Instances      int      `json:"instances"`      // current
	Holdings       Holdings `json:"holdings"`       // current
	// Snapshot is the state from which the pod's instances begin.
	Snapshot    SnapshotState `json:"snapshot,omitzero"`
	Active      int           `json:"active"` // requests in progress
	Requests    uint64        `json:"requests"`
	Traps       uint64        `json:"traps"`
	Timeouts    uint64        `json:"timeouts"`   // guests killed at their deadline
	OutOfMemory uint64        `json:"oom"`        // guests killed at their memory limit
	LogDropped  uint64        `json:"logDropped"` // bytes of output that could not be logged
	// ChannelDropped is the number of channel messages lost because the daemon was absent or the guest did not read.
	ChannelDropped uint64 `json:"channelDropped,omitempty"`
	// Connections is the number of open connections. Rejected counts refused and forcibly closed connections by reason
	// (a constant of package connlimit).
	Connections int               `json:"connections,omitempty"`
	Rejected    map[string]uint64 `json:"rejected,omitempty"`
}

// Metrics are the counters of one pod, by method.
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
	// Codes counts responses by gRPC code (in canonical spelling: "OK", "INTERNAL") or by HTTP status ("200").
	Codes map[string]uint64 `json:"codes"`
	// Buckets[i] is the number of responses whose duration in seconds is in (Bounds[i-1], Bounds[i]]. The last bucket
	// counts the responses above all bounds.
	Bounds  []float64 `json:"bounds"`
	Buckets []uint64  `json:"buckets"`
	Seconds float64   `json:"seconds"` // sum of all durations
}

// profileRequest asks for a Profile.
type profileRequest struct {
	ID  string `json:"id"`
	Nth int    `json:"nth"`
}

// Profile says where a guest is during a call.
type Profile struct {
	Typical time.Duration `json:"typical"` // of a call that nothing disturbs: the median
	// Samples counts random moments of calls, by the functions in which the guest was: separated by Inside, the innermost
	// first.
	Samples map[string]int `json:"samples"`
}

// Inside separates functions in a Profile.
const Inside = "\n"

// Event is an event of a worker. Exactly one field is set.
type Event struct {
	// Exited is the status of a pod that has exited for any reason.
	Exited *Status
	// Fallback says that a pod runs slower than it could.
	Fallback *Fallback
	// Spans is a serialized opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest.
	Spans []byte
}

// Fallback says that a pod runs slower than it could, until it is started again.
type Fallback struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
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

// Update changes the limits of a running pod. Nil fields change nothing.
type Update struct {
	ID        string     `json:"id"`
	Resources *Resources `json:"resources,omitempty"`
	Limits    *Limits    `json:"limits,omitempty"`
}

type idsRequest struct {
	IDs []string `json:"ids,omitempty"`
}
