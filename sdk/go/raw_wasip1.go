package tripodgrpc

import (
	"errors"
	"io"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// The imports and exports of the world raw-server (sdk/wit/tripod-grpc-raw.wit) by the canonical ABI
// (https://github.com/WebAssembly/component-model/blob/main/design/mvp/CanonicalABI.md).

//go:wasmimport tripod:grpc/raw@0.1.0 receive
func rawReceive(wait uint32, result unsafe.Pointer)

//go:wasmimport tripod:grpc/raw@0.1.0 take
func rawTake(result unsafe.Pointer)

//go:wasmimport tripod:grpc/raw@0.1.0 send
func rawSend(message unsafe.Pointer, size uint32, result unsafe.Pointer)

//go:wasmimport tripod:grpc/raw@0.1.0 send-header
func rawSendHeader(result unsafe.Pointer)

//go:wasmimport tripod:grpc/raw@0.1.0 ended
func rawEnded(result unsafe.Pointer)

//go:wasmimport tripod:grpc/raw@0.1.0 events
func rawEvents() uint32

//go:wasmimport tripod:grpc/response@0.1.0 set-header
func rawSetHeader(key unsafe.Pointer, keySize uint32, value unsafe.Pointer, valueSize uint32)

//go:wasmimport tripod:grpc/response@0.1.0 set-trailer
func rawSetTrailer(key unsafe.Pointer, keySize uint32, value unsafe.Pointer, valueSize uint32)

// list is a string or list in memory.
type list struct{ at, size uint32 }

// lowStatus is the record status in memory.
type lowStatus struct {
	code             uint32
	message, details list
}

// lowResult is result<_, status>, result<received, status> or option<status> in memory. In a result<received, status>
// without error, the first word of the status is the case of received and the second is the size.
type lowResult struct {
	which  uint32
	status lowStatus
}

// Cases of received.
const (
	receivedMessage = iota
	receivedEnd
	receivedPending
)

// pointer converts an address in linear memory.
func pointer(at uint32) unsafe.Pointer { return unsafe.Add(unsafe.Pointer(nil), at) }

func bytesAt(l list) []byte {
	if l.size == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(pointer(l.at)), l.size)
}

func listOf(b []byte) list {
	return list{uint32(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), uint32(len(b))}
}

// ---- memory that the host asks for ----

// Allocating Go memory inside a host call could start a garbage collection and let other goroutines run, which then
// could call the host in the middle of that call. So cabi_realloc serves small values from scratch and a message from
// the buffer that take has prepared. Only the arguments of a new call can be larger.
var (
	scratch  = make([]uint64, 4096)
	used     uintptr // bytes of scratch
	prepared []byte  // for the message that take is about to receive
	taken    list    // the result of take
	pinned   [][]uint64
)

// cabiRealloc allocates memory for a value from the host. The host never grows an allocation.
//
//go:wasmexport cabi_realloc
func cabiRealloc(old unsafe.Pointer, oldSize, align, size uint32) unsafe.Pointer {
	if n := uintptr(size); n > 0 && int(size) == len(prepared) {
		return unsafe.Pointer(unsafe.SliceData(prepared))
	} else if at, room := (used+7)&^7, uintptr(len(scratch))*8; at+n <= room {
		used = at + n
		return unsafe.Add(unsafe.Pointer(unsafe.SliceData(scratch)), min(at, room-8))
	}
	more := make([]uint64, (size+7)/8)
	pinned = append(pinned, more)
	return unsafe.Pointer(unsafe.SliceData(more))
}

// releaseAll frees what cabi_realloc has given away. The caller has copied everything.
func releaseAll() { used, pinned = 0, nil }

// ---- calls ----

// rawCall is the host's side of the current call.
type rawCall struct {
	buffer   []byte
	received lowResult // of look
	why      lowResult // of gone
	file     *os.File
	over     bool
	err      error // the error that receive or send has returned
}

var errOver = errors.New("the call is over")

// receive implements host. Without block, it lets other goroutines run while it waits.
func (c *rawCall) receive(block bool) ([]byte, error) {
	size, pending, err := c.look(block)
	if pending {
		events, closed := c.events()
		if closed == nil {
			closed = events.Read(func(uintptr) bool { // before the first wait, and after each
				size, pending, err = c.look(false)
				return !pending
			})
		}
		if closed != nil {
			return nil, errClosed
		}
	}
	if err != nil {
		return nil, err
	}
	return c.take(size), nil
}

// look asks for the size of the next message. Nothing may be allocated between the check of over and the host call.
func (c *rawCall) look(block bool) (size uint32, pending bool, err error) {
	switch {
	case c.err != nil:
		return 0, false, c.err
	case c.over:
		return 0, false, errClosed
	}
	wait := uint32(0)
	if block {
		wait = 1
	}
	r := &c.received
	*r = lowResult{} // the host writes one byte of a uint32 that is a case
	rawReceive(wait, unsafe.Pointer(r))
	if r.which != 0 {
		return 0, false, c.fail(r)
	}
	switch r.status.code {
	case receivedEnd:
		return 0, false, io.EOF
	case receivedPending:
		return 0, true, nil
	}
	return r.status.message.at, false, nil
}

// take receives the message that look has announced. Nothing may be allocated while prepared is set, because another
// goroutine could use it.
func (c *rawCall) take(size uint32) []byte {
	if int(size) > cap(c.buffer) {
		c.buffer = make([]byte, size)
	}
	prepared = c.buffer[:size]
	rawTake(unsafe.Pointer(&taken))
	used, prepared = 0, nil
	return c.buffer[:size]
}

// send implements host.
func (c *rawCall) send(message []byte) error {
	if c.err != nil {
		return c.err
	}
	var r lowResult
	rawSend(unsafe.Pointer(unsafe.SliceData(message)), uint32(len(message)), unsafe.Pointer(&r))
	runtime.KeepAlive(message)
	return c.fail(&r)
}

// sendHeader implements host.
func (c *rawCall) sendHeader() error {
	var r lowResult
	rawSendHeader(unsafe.Pointer(&r))
	return c.fail(&r)
}

// fail returns the error in a result from the host, if there is one.
func (c *rawCall) fail(r *lowResult) error {
	if r.which == 0 {
		return nil
	}
	c.err = status.Error(codes.Code(r.status.code), string(bytesAt(r.status.message)))
	used = 0
	return c.err
}

// setHeader implements host.
func (c *rawCall) setHeader(key, value string) {
	rawSetHeader(unsafe.Pointer(unsafe.StringData(key)), uint32(len(key)), unsafe.Pointer(unsafe.StringData(value)), uint32(len(value)))
}

// setTrailer implements host.
func (c *rawCall) setTrailer(key, value string) {
	rawSetTrailer(unsafe.Pointer(unsafe.StringData(key)), uint32(len(key)), unsafe.Pointer(unsafe.StringData(value)), uint32(len(value)))
}

// gone implements client. Nothing may be allocated between the check of over and the host call.
func (c *rawCall) gone() codes.Code {
	if c.over {
		return codes.Canceled
	}
	r := &c.why
	*r = lowResult{}
	rawEnded(unsafe.Pointer(r))
	used = 0
	if r.which == 0 {
		return codes.OK
	}
	return codes.Code(r.status.code)
}

// watch implements client.
func (c *rawCall) watch(check func() bool) {
	events, err := c.events()
	if err != nil {
		return // the call is over
	}
	_ = events.Write(func(uintptr) bool { return check() }) // fails at the end of the call
}

// events returns the descriptor that is ready when receive or gone would answer. Go's runtime waits for it together
// with its timers, in poll_oneoff.
func (c *rawCall) events() (syscall.RawConn, error) {
	if c.over {
		return nil, errOver
	}
	if c.file == nil {
		c.file = os.NewFile(uintptr(rawEvents()), "tripod:grpc/raw")
	}
	return c.file.SyscallConn()
}

// end ends the call for goroutines that still wait for it.
func (c *rawCall) end() {
	c.over = true
	if c.file != nil {
		_ = c.file.Close() // wakes them
	}
}

// endCalls closes the calls to other servers; nil if there were none. It is a variable so that programs without clients do
// not import tripod:grpc/client.
var endCalls func()

// ---- exports ----

// result is where the exported functions leave their results.
var result struct {
	low     lowResult
	keep    [][]byte // what low refers to
	details []list
}

type lowEntry struct{ key, value list }

// handle is tripod:grpc/handler#handle: func(context) -> result<_, status>.
//
//go:wasmexport tripod:grpc/handler@0.1.0#handle
func handle(method, methodSize, peer, peerSize, hasTimeout uint32, timeout uint64, entries, count uint32) unsafe.Pointer {
	renew() // first of all, before anything can use a random value
	procedure, address := string(bytesAt(list{method, methodSize})), string(bytesAt(list{peer, peerSize}))
	md := make(metadata.MD, count)
	if count > 0 {
		for _, e := range unsafe.Slice((*lowEntry)(pointer(entries)), count) {
			key := string(bytesAt(e.key))
			md[key] = append(md[key], string(bytesAt(e.value)))
		}
	}
	releaseAll()
	s, err := server()
	if err != nil {
		return lowerStatus(status.New(codes.Unimplemented, err.Error()))
	}
	c := &rawCall{}
	defer c.end()
	defer func() {
		if endCalls != nil {
			endCalls()
		}
	}()
	left := time.Duration(-1)
	if hasTimeout != 0 {
		left = time.Duration(min(timeout, 1<<62))
	}
	ctx, end := newContext(c, md, address, left)
	defer end()
	return lowerStatus(s.handle(ctx, procedure, c))
}

// lowerStatus writes a status to result; nil is success.
func lowerStatus(st *status.Status) unsafe.Pointer {
	result.low, result.keep, result.details = lowResult{}, nil, nil
	if st.Code() == codes.OK {
		return unsafe.Pointer(&result.low)
	}
	for _, d := range st.Proto().GetDetails() {
		b, err := proto.Marshal(d)
		if err != nil {
			continue
		}
		result.keep, result.details = append(result.keep, b), append(result.details, listOf(b))
	}
	message := []byte(st.Message())
	result.keep = append(result.keep, message)
	result.low = lowResult{1, lowStatus{uint32(st.Code()), listOf(message), list{
		uint32(uintptr(unsafe.Pointer(unsafe.SliceData(result.details)))), uint32(len(result.details)),
	}}}
	return unsafe.Pointer(&result.low)
}

// lowerText writes the error of a result<_, string> to result.
func lowerText(err error) unsafe.Pointer {
	text := []byte(err.Error())
	l := listOf(text)
	result.low, result.keep, result.details = lowResult{1, lowStatus{code: l.at, message: list{at: l.size}}}, [][]byte{text}, nil
	return unsafe.Pointer(&result.low)
}

// describe is tripod:grpc/descriptors#describe: func() -> result<description, string>.
//
//go:wasmexport tripod:grpc/descriptors@0.1.0#describe
func describe() unsafe.Pointer {
	s, err := server()
	var services []string
	var files []byte
	if err == nil {
		services, files, err = s.describe()
	}
	if err != nil {
		return lowerText(err)
	}
	result.low, result.keep, result.details = lowResult{}, [][]byte{files}, nil
	for _, name := range services {
		b := []byte(name)
		result.keep, result.details = append(result.keep, b), append(result.details, listOf(b))
	}
	low := listOf(files)
	result.low.status = lowStatus{
		uint32(uintptr(unsafe.Pointer(unsafe.SliceData(result.details)))), list{uint32(len(services)), low.at}, list{at: low.size},
	}
	return unsafe.Pointer(&result.low)
}
