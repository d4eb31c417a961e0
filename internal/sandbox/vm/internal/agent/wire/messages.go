package wire

import "math"

// PortName is the name of the virtio-serial port in the guest: /dev/virtio-ports/<PortName>.
const PortName = "dev.tripod.agent.0"

// SessionPortNames are the names of further ports, for the exec and port-forward sessions that outlive the daemon. There
// are two, because an earlier build can still serve sessions on one. Machines that an earlier release defined lack them.
var SessionPortNames = [2]string{"dev.tripod.sessions.0", "dev.tripod.sessions.1"}

// The oldest and the newest supported version of the protocol. An agent of version SessionsVersion or later also serves
// the ports SessionPortNames.
const (
	MinVersion      = 1
	MaxVersion      = 2
	SessionsVersion = 2
)

// The channels of a stream.
const (
	// ChannelIn carries data to the guest, the others to the host.
	ChannelIn  = 0
	ChannelOut = 1
	ChannelErr = 2

	channels = 3
)

// Op is the operation for which a stream is opened.
type Op byte

// The operations. Their numbers are part of the protocol. The number 5 is reserved, because it would make the agent in
// an older guest power off the guest.
const (
	OpExec  Op = 1
	OpDial  Op = 2
	OpInfo  Op = 3
	OpStats Op = 4
	// OpService is a call of the service in a guest that runs containers. The agents of other guests have no service. The
	// request and the data in the channels belong to the service.
	OpService Op = 6
)

// Hello begins a session. It has the oldest and the newest version that the host supports.
type Hello struct{ MinVersion, MaxVersion uint64 }

func (m Hello) Append(b []byte) []byte {
	e := encoder(b)
	e.uint(m.MinVersion)
	e.uint(m.MaxVersion)
	return e
}

func (m *Hello) Parse(b []byte) error {
	d := decoder{b: b}
	m.MinVersion, m.MaxVersion = d.uint(), d.uint()
	return d.err
}

// Welcome answers Hello. Version 0 means that the two sides have no version in common.
type Welcome struct {
	Version uint64
	// Program is the version of the guest's program.
	Program string
}

func (m Welcome) Append(b []byte) []byte {
	e := encoder(b)
	e.uint(m.Version)
	e.string(m.Program)
	return e
}

func (m *Welcome) Parse(b []byte) error {
	d := decoder{b: b}
	m.Version, m.Program = d.uint(), d.string()
	return d.err
}

// Exec is the request of OpExec. The result has the exit code and, if a signal killed the program, the signal. If the
// program was not started, the result has an error instead.
type Exec struct {
	Args []string
	// Env is added to the agent's default environment.
	Env []string
	// Dir is the working directory; "" is the user's home directory.
	Dir string
	// User is a user name or ID, optionally followed by ":" and a group name or ID; "" is root.
	User string
	// TTY runs the program on a terminal of Columns x Rows. ChannelErr is then unused.
	TTY           bool
	Columns, Rows uint16
	// Stdin, Stdout and Stderr select the channels to use. If one is not selected, the program gets /dev/null instead.
	Stdin, Stdout, Stderr bool
}

func (m Exec) Append(b []byte) []byte {
	e := encoder(b)
	e.strings(m.Args)
	e.strings(m.Env)
	e.string(m.Dir)
	e.string(m.User)
	e.bool(m.TTY)
	e.uint(uint64(m.Columns))
	e.uint(uint64(m.Rows))
	e.bool(m.Stdin)
	e.bool(m.Stdout)
	e.bool(m.Stderr)
	return e
}

func (m *Exec) Parse(b []byte) error {
	d := decoder{b: b}
	m.Args, m.Env, m.Dir, m.User = d.strings(), d.strings(), d.string(), d.string()
	m.TTY, m.Columns, m.Rows = d.bool(), uint16(d.small(math.MaxUint16)), uint16(d.small(math.MaxUint16))
	m.Stdin, m.Stdout, m.Stderr = d.bool(), d.bool(), d.bool()
	return d.err
}

// Dial is the request of OpDial, a TCP connection to the guest's localhost.
type Dial struct{ Port uint16 }

func (m Dial) Append(b []byte) []byte {
	e := encoder(b)
	e.uint(uint64(m.Port))
	return e
}

func (m *Dial) Parse(b []byte) error {
	d := decoder{b: b}
	m.Port = uint16(d.small(math.MaxUint16))
	return d.err
}

// Class is the class of the error in a Result.
type Class byte

// The classes. Their numbers are part of the protocol.
const (
	ClassNone Class = iota
	ClassInvalidArgument
	ClassNotFound
	ClassFailedPrecondition
	ClassUnavailable
	ClassUnimplemented
	ClassExhausted
	ClassInternal
)

// Result ends a stream.
type Result struct {
	// Class and Message are the error. ClassNone means success.
	Class   Class
	Message string
	// Exit is a program's exit code. Signal is the number of the signal that killed it, or 0.
	Exit   int32
	Signal uint8
	// Body is the result of OpInfo or OpStats, encoded.
	Body string
}

func (m Result) Append(b []byte) []byte {
	e := encoder(b)
	e.uint(uint64(m.Class))
	e.string(m.Message)
	e.int(int64(m.Exit))
	e.uint(uint64(m.Signal))
	e.string(m.Body)
	return e
}

func (m *Result) Parse(b []byte) error {
	d := decoder{b: b}
	m.Class, m.Message = Class(d.small(math.MaxUint8)), d.string()
	exit := d.int()
	if exit < math.MinInt32 || exit > math.MaxInt32 {
		d.fail()
	}
	m.Exit, m.Signal, m.Body = int32(exit), uint8(d.small(math.MaxInt8)), d.string()
	return d.err
}
