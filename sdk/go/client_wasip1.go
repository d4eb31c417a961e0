package tripodgrpc

import (
	"io"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// The imports of tripod:grpc/client (sdk/wit/tripod-grpc-client.wit) by the canonical ABI.

//go:wasmimport tripod:grpc/client@0.1.0 start
func clientStart(target unsafe.Pointer, targetSize uint32, hasAuthority uint32, authority unsafe.Pointer, authoritySize uint32,
	method unsafe.Pointer, methodSize uint32, hasTimeout uint32, timeout uint64, metadata unsafe.Pointer, metadataSize uint32,
	maxReceive uint32, result unsafe.Pointer)

//go:wasmimport tripod:grpc/client@0.1.0 send
func clientSend(call uint32, message unsafe.Pointer, size uint32) uint32

//go:wasmimport tripod:grpc/client@0.1.0 finish
func clientFinish(call uint32)

//go:wasmimport tripod:grpc/client@0.1.0 next
func clientNext(call uint32, result unsafe.Pointer)

//go:wasmimport tripod:grpc/client@0.1.0 take
func clientTake(call uint32, result unsafe.Pointer)

//go:wasmimport tripod:grpc/client@0.1.0 events
func clientEvents(call uint32) uint32

//go:wasmimport tripod:grpc/client@0.1.0 close
func clientClose(call uint32)

// Cases of sending and of event.
const (
	sendingSent = iota
	sendingPending
	sendingEnded
)
const (
	eventHeader = iota
	eventMessage
	eventEnd
)

// lowEvent is the variant event in memory.
type lowEvent struct {
	which   uint32
	first   uint32 // the header's address, a message's size, or whether there is an error
	second  uint32 // the header's length, or the error's code
	message list
	details list
	trailer list
}

// answerSize is the size of the memory for what the host answers to a client, in bytes: more than the 64 KiB of metadata
// that the host accepts, twice, because a status repeats a part of it.
const answerSize = 160 << 10

// ClientConn is a connection to a server. It implements [grpc.ClientConnInterface], for the clients in generated code.
type ClientConn struct{ *dialed }

// NewClient makes a ClientConn for HOST:PORT, dns:///HOST:PORT or passthrough:///HOST:PORT. It connects at the first call.
// In a guest, the host connects, and the instances of a pod share its connections. On other platforms, the ClientConn is
// grpc-go's.
func NewClient(target string, opts ...ClientOption) (*ClientConn, error) {
	d, err := newDialed(target, opts, startCall)
	if err != nil {
		return nil, err
	}
	return &ClientConn{d}, nil
}

// answers are pieces of memory for what the host answers.
var answers [][]uint64

// takeAnswer returns memory for an answer of the host; giveAnswer returns it.
func takeAnswer() []uint64 {
	if n := len(answers); n > 0 {
		a := answers[n-1]
		answers = answers[:n-1]
		return a
	}
	return make([]uint64, answerSize/8)
}

func giveAnswer(a []uint64) { answers = append(answers, a) }

// outCall implements clientHost. Between a check of closed and the host call that follows, nothing may be allocated, so
// that no other goroutine runs.
type outCall struct {
	number uint32
	closed bool // the host does not know the number any more
	file   *os.File
	ready  syscall.RawConn
	buffer []byte
	event  lowEvent // of look
}

// open holds the calls that the host knows.
var open = map[*outCall]struct{}{}

// closeAll closes the calls to other servers when the guest's own call ends, because the host does it, too.
func closeAll() {
	for c := range open {
		c.close()
	}
}

func startCall(r *clientRequest) (clientHost, error) {
	endCalls = closeAll
	var low []lowEntry
	var keep [][]byte
	for name, values := range r.metadata {
		for _, v := range values {
			key, value := []byte(name), []byte(v)
			low, keep = append(low, lowEntry{listOf(key), listOf(value)}), append(keep, key, value)
		}
	}
	hasAuthority, hasTimeout := uint32(0), uint32(0)
	if r.authority != "" {
		hasAuthority = 1
	}
	if r.timeout >= 0 {
		hasTimeout = 1
	}
	var answer lowResult
	c, mine := &outCall{}, takeAnswer()
	defer giveAnswer(mine)
	saved, savedUsed := scratch, used
	scratch, used = mine, 0
	clientStart(unsafe.Pointer(unsafe.StringData(r.target)), uint32(len(r.target)),
		hasAuthority, unsafe.Pointer(unsafe.StringData(r.authority)), uint32(len(r.authority)),
		unsafe.Pointer(unsafe.StringData(r.method)), uint32(len(r.method)), hasTimeout, uint64(r.timeout),
		unsafe.Pointer(unsafe.SliceData(low)), uint32(len(low)), r.maxReceive, unsafe.Pointer(&answer))
	scratch, used = saved, savedUsed
	runtime.KeepAlive(keep)
	if answer.which != 0 {
		return nil, statusAt(&answer.status).Err()
	}
	c.number = answer.status.code
	open[c] = struct{}{}
	if c.closed {
		return nil, errClosed
	}
	c.file = os.NewFile(uintptr(clientEvents(c.number)), "tripod:grpc/client")
	var err error
	if c.ready, err = c.file.SyscallConn(); err != nil {
		c.close()
		return nil, status.Error(codes.Internal, err.Error())
	}
	return c, nil
}

// statusAt copies a status from memory.
func statusAt(low *lowStatus) *status.Status {
	p := status.New(codes.Code(low.code), string(bytesAt(low.message))).Proto()
	if low.details.size > 0 {
		for _, d := range unsafe.Slice((*list)(pointer(low.details.at)), low.details.size) {
			detail := new(anypb.Any)
			if proto.Unmarshal(bytesAt(d), detail) == nil {
				p.Details = append(p.Details, detail)
			}
		}
	}
	return status.FromProto(p)
}

// metadataAt copies metadata from memory. It is never nil.
func metadataAt(l list) metadata.MD {
	md := metadata.MD{}
	if l.size > 0 {
		for _, e := range unsafe.Slice((*lowEntry)(pointer(l.at)), l.size) {
			key := string(bytesAt(e.key))
			md[key] = append(md[key], string(bytesAt(e.value)))
		}
	}
	return md
}

// send implements clientHost.
func (c *outCall) send(message []byte) error {
	outcome := c.trySend(message)
	if outcome == sendingPending {
		err := c.ready.Write(func(uintptr) bool { // before the first wait, and after each
			outcome = c.trySend(message)
			return outcome != sendingPending
		})
		if err != nil {
			return io.EOF
		}
	}
	if outcome != sendingSent {
		return io.EOF
	}
	return nil
}

func (c *outCall) trySend(message []byte) uint32 {
	if c.closed {
		return sendingEnded
	}
	outcome := clientSend(c.number, unsafe.Pointer(unsafe.SliceData(message)), uint32(len(message)))
	runtime.KeepAlive(message)
	return outcome
}

// finish implements clientHost.
func (c *outCall) finish() {
	if !c.closed {
		clientFinish(c.number)
	}
}

// next implements clientHost.
func (c *outCall) next() (clientEvent, error) {
	e, pending, err := c.look()
	if pending {
		waited := c.ready.Read(func(uintptr) bool {
			e, pending, err = c.look()
			return !pending
		})
		if waited != nil {
			return clientEvent{}, errClosed
		}
	}
	return e, err
}

// look asks for the next event.
func (c *outCall) look() (e clientEvent, pending bool, err error) {
	mine := takeAnswer()
	defer giveAnswer(mine)
	if c.closed {
		return e, false, errClosed
	}
	low := &c.event
	*low = lowEvent{} // the host writes one byte of a uint32 that is a case
	saved, savedUsed := scratch, used
	scratch, used = mine, 0
	clientNext(c.number, unsafe.Pointer(low))
	scratch, used = saved, savedUsed
	switch low.which {
	case eventHeader:
		e.header = metadataAt(list{low.first, low.second})
	case eventMessage:
		e.message, err = c.take(low.first)
	case eventEnd:
		e.end, e.trailer = true, metadataAt(low.trailer)
		if low.first != 0 {
			e.status = statusAt(&lowStatus{low.second, low.message, low.details})
		}
	default:
		return e, true, nil
	}
	return e, false, err
}

// take receives the message that look has found.
func (c *outCall) take(size uint32) ([]byte, error) {
	if int(size) > cap(c.buffer) {
		c.buffer = make([]byte, size)
	}
	if c.closed { // while the buffer was allocated
		return nil, errClosed
	}
	prepared = c.buffer[:size]
	clientTake(c.number, unsafe.Pointer(&taken))
	used, prepared = 0, nil
	return c.buffer[:size], nil
}

// close implements clientHost. It also wakes goroutines that wait for the call.
func (c *outCall) close() {
	if c.closed {
		return
	}
	c.closed = true
	delete(open, c)
	clientClose(c.number)
	_ = c.file.Close()
}

var _ grpc.ClientConnInterface = (*ClientConn)(nil)
