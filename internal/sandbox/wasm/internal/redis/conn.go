package redis

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

// Limits of a reply.
const (
	maxReply    = wasi.MaxValue // bytes of all strings
	maxElements = 10_000        // of all arrays
	maxDepth    = 3
	elementSize = 64 // bytes of memory for an element, which hold is called for
)

// conn is a connection to a server. It is used for one command at a time.
type conn struct {
	net.Conn
	in   *bufio.Reader
	out  *bufio.Writer
	used time.Time
}

func newConn(c net.Conn) *conn {
	return &conn{Conn: c, in: bufio.NewReader(c), out: bufio.NewWriter(c)}
}

// serverError is an error reply. The connection can be used further.
type serverError string

func (e serverError) Error() string { return "the server says: " + string(e) }

// class returns the error without its text: only the first word.
func (e serverError) class() serverError {
	word, _, _ := strings.Cut(string(e), " ")
	return serverError(word)
}

// Is makes refusals errdefs.ErrPermissionDenied.
func (e serverError) Is(target error) bool {
	code := e.class()
	return target == errdefs.ErrPermissionDenied && (code == "NOAUTH" || code == "WRONGPASS" || code == "NOPERM")
}

var (
	errProtocol = errors.New("the server does not speak the protocol of Redis")
	errTooLarge = fmt.Errorf("the server's reply is larger than %d bytes or %d elements", maxReply, maxElements)
)

// reply is a string, a number or an array. A string is nil if there is none.
type reply struct {
	text   []byte
	number int64
	array  []reply
}

// send writes a command.
func (c *conn) send(name string, args ...[]byte) error {
	fmt.Fprintf(c.out, "*%d\r\n$%d\r\n%s\r\n", 1+len(args), len(name), name)
	for _, arg := range args {
		fmt.Fprintf(c.out, "$%d\r\n", len(arg))
		_, _ = c.out.Write(arg)
		_, _ = c.out.WriteString("\r\n")
	}
	return c.out.Flush() // returns the first error of all writes
}

// reader reads one reply.
type reader struct {
	*conn
	hold            func(n int) error
	bytes, elements int // so far
}

// receive reads the reply to a command.
func (c *conn) receive(hold func(n int) error) (reply, error) {
	r := &reader{conn: c, hold: hold}
	return r.read(0)
}

func (r *reader) read(depth int) (reply, error) {
	line, err := r.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) || err == nil && (len(line) < 3 || line[len(line)-2] != '\r') {
		return reply{}, errProtocol
	}
	if err != nil {
		return reply{}, err
	}
	kind, rest := line[0], string(line[1:len(line)-2])
	switch kind {
	case '+':
		if err := r.take(len(rest)); err != nil {
			return reply{}, err
		}
		return reply{text: []byte(rest)}, nil
	case '-':
		return reply{}, serverError(strings.ToValidUTF8(rest, "\uFFFD"))
	}
	n, err := strconv.ParseInt(rest, 10, 64)
	switch {
	case err != nil, n < -1 && kind != ':':
		return reply{}, errProtocol
	case kind == ':':
		return reply{number: n}, nil
	case kind == '$':
		return r.text(n)
	case kind == '*' && depth < maxDepth:
		return r.array(n, depth)
	}
	return reply{}, errProtocol
}

// take counts a string of n bytes before it is stored.
func (r *reader) take(n int) error {
	if n > maxReply-r.bytes {
		return errTooLarge
	}
	r.bytes += n
	return r.hold(n)
}

func (r *reader) text(n int64) (reply, error) {
	if n < 0 {
		return reply{}, nil
	}
	if err := r.take(int(n)); err != nil {
		return reply{}, err
	}
	text := make([]byte, n+2)
	if _, err := io.ReadFull(r.in, text); err != nil {
		return reply{}, err
	}
	if string(text[n:]) != "\r\n" {
		return reply{}, errProtocol
	}
	return reply{text: text[:n:n]}, nil
}

func (r *reader) array(n int64, depth int) (reply, error) {
	if n < 0 {
		return reply{}, nil
	}
	if n > int64(maxElements-r.elements) {
		return reply{}, errTooLarge
	}
	r.elements += int(n)
	if err := r.hold(int(n) * elementSize); err != nil {
		return reply{}, err
	}
	array := make([]reply, n)
	for i := range array {
		var err error
		if array[i], err = r.read(depth + 1); err != nil {
			if _, ok := errors.AsType[serverError](err); ok {
				err = errProtocol // no command that we send has errors in arrays
			}
			return reply{}, err
		}
	}
	return reply{array: array}, nil
}
