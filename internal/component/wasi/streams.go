package wasi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// InputStream is the resource input-stream of wasi:io/streams.
type InputStream struct {
	Input
	failed  bool
	release func() // called when the guest drops the stream, unless it is nil
}

// OutputStream is the resource output-stream of wasi:io/streams.
type OutputStream struct {
	Output
	failed  bool
	release func() // called when the guest drops the stream, unless it is nil
}

// Close is called when the guest drops the stream.
func (s *InputStream) Close() error {
	if s.release != nil {
		s.release()
	}
	return nil
}

// Close is called when the guest drops the stream.
func (s *OutputStream) Close() error {
	if s.release != nil {
		s.release()
	}
	return nil
}

// StreamError is the resource "error" of wasi:io/error.
type StreamError struct{ Cause error }

// maxRead is the maximum number of bytes in one read. There is a limit because the result is copied into the guest's
// memory in one piece.
const maxRead = window

// clampLength limits n, a length that the guest has passed, to maxRead.
func clampLength(n uint64) int { return int(min(n, maxRead)) }

// streamFailed writes the error result of a stream operation: "last-operation-failed" with err the first time, and
// "closed" from then on. After the normal end of the stream, the result is always "closed".
func (c *Call) streamFailed(failed *bool, err error) {
	if *failed || errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) {
		c.FailedWith(1) // closed
		return
	}
	*failed = true
	c.FailedWith(0) // last-operation-failed
	c.Own(&StreamError{err})
}

// read returns up to n bytes. If the parameter wait is true, read waits for the first byte.
func (c *Call) read(s *InputStream, n int, wait bool) ([]byte, error) {
	if wait && n > 0 {
		s.Fill()
		if err := c.wait(c, When(s.Ready)); err != nil {
			return nil, &callError{err}
		}
	}
	data, err := s.Next(n)
	if len(data) == 0 && err == nil {
		s.Begin()
	}
	if len(data) > 0 && c.Renew != nil {
		c.Renew()
	}
	return data, err
}

// callError is an error that ends the guest's call, as opposed to an error of the stream.
type callError struct{ error }

func (e *callError) Unwrap() error { return e.error }

func isCallError(err error) bool {
	e, ok := errors.AsType[*callError](err)
	return ok && e != nil
}

// readFunc returns one of the four functions that read from a stream. The parameter write is a function that appends
// the bytes or their number to the result.
func readFunc(wait bool, write func(c *Call, data []byte)) Func {
	return func(c *Call) error {
		s, err := Get[*InputStream](c.State, c.In.U32())
		if err != nil {
			return err
		}
		data, err := c.read(s, clampLength(c.In.U64()), wait)
		switch {
		case isCallError(err):
			return err
		case err != nil:
			c.streamFailed(&s.failed, err)
		default:
			c.OK()
			write(c, data)
		}
		return nil
	}
}

func writeBytes(c *Call, data []byte) { c.Out = wit.AppendBytes(c.Out, data) }

func writeLength(c *Call, data []byte) { c.Out = wit.AppendU64(c.Out, uint64(len(data))) }

// subscribeInput returns a pollable that is ready when a read would return data or an error. Polling the pollable makes
// the stream read ahead.
func subscribeInput(c *Call) error {
	s, err := Get[*InputStream](c.State, c.In.U32())
	if err != nil {
		return err
	}
	c.Own(When(func() bool {
		if s.Ready() {
			return true
		}
		s.Begin()
		return false
	}))
	return nil
}

// writeFunc makes a method of output-stream from the given function.
func writeFunc(do func(c *Call, s *OutputStream) error) Func {
	return func(c *Call) error {
		s, err := Get[*OutputStream](c.State, c.In.U32())
		if err != nil {
			return err
		}
		err = do(c, s)
		if err == nil || isCallError(err) {
			return errors.Unwrap(err)
		}
		c.streamFailed(&s.failed, err)
		return nil
	}
}

func checkWrite(c *Call, s *OutputStream) error {
	n, err := s.Room()
	if err != nil {
		return err
	}
	c.OK()
	c.Out = wit.AppendU64(c.Out, uint64(n))
	return nil
}

// write writes p. If p is longer than the stream has room for, the guest's call ends.
func write(c *Call, s *OutputStream, p []byte) error {
	n, err := s.Room()
	if err != nil {
		return err
	}
	if len(p) > n {
		return &callError{fmt.Errorf("%d bytes were written where %d were allowed", len(p), n)}
	}
	if err := s.Write(p); err != nil {
		return err
	}
	c.OK()
	return nil
}

// through writes p, after what was written before, and waits until the destination has everything.
func through(c *Call, s *OutputStream, p []byte) error {
	for done := false; !done; {
		if err := c.wait(c, When(func() bool { return !s.Busy() })); err != nil {
			return &callError{err}
		}
		var err error
		done, err = s.Through(p)
		if err != nil && c.Err() != nil {
			return &callError{context.Cause(c)}
		}
		if err != nil {
			return err
		}
	}
	c.OK()
	return nil
}

func flush(c *Call, s *OutputStream) error {
	if _, err := s.Room(); err != nil {
		return err
	}
	s.Flush()
	c.OK()
	return nil
}

var zeroes [window]byte

// zeroesOf returns n zero bytes. If n is larger than window, the guest's call ends.
func zeroesOf(n uint64) ([]byte, error) {
	if n > window {
		return nil, &callError{fmt.Errorf("%d zeroes were written where at most %d are allowed", n, window)}
	}
	return zeroes[:n], nil
}

// splice moves bytes from one stream to another. If the parameter wait is true, it waits for data in the first stream
// and for room in the second.
func splice(wait bool) func(c *Call, to *OutputStream) error {
	return func(c *Call, to *OutputStream) error {
		from, err := Get[*InputStream](c.State, c.In.U32())
		if err != nil {
			return &callError{err}
		}
		n := clampLength(c.In.U64())
		room := func() bool { free, err := to.Room(); return free > 0 || err != nil }
		if wait && n > 0 && !room() {
			to.Flush()
			if err := c.wait(c, When(room)); err != nil {
				return &callError{err}
			}
		}
		free, err := to.Room()
		if err != nil {
			return err
		}
		data, err := c.read(from, min(n, free), wait)
		if err != nil {
			return err
		}
		if err := to.Write(data); err != nil {
			return err
		}
		c.OK()
		writeLength(c, data)
		return nil
	}
}

func subscribeOutput(c *Call) error {
	s, err := Get[*OutputStream](c.State, c.In.U32())
	if err != nil {
		return err
	}
	c.Own(Pollable(func() (bool, time.Time) {
		n, err := s.Room()
		return n > 0 || err != nil, time.Time{}
	}))
	return nil
}

var streamFuncs = map[string]Func{
	"[method]input-stream.read":          readFunc(false, writeBytes),
	"[method]input-stream.blocking-read": readFunc(true, writeBytes),
	"[method]input-stream.skip":          readFunc(false, writeLength),
	"[method]input-stream.blocking-skip": readFunc(true, writeLength),
	"[method]input-stream.subscribe":     subscribeInput,

	"[method]output-stream.check-write": writeFunc(checkWrite),
	"[method]output-stream.write":       writeFunc(func(c *Call, s *OutputStream) error { return write(c, s, c.In.Bytes()) }),
	"[method]output-stream.blocking-write-and-flush": writeFunc(func(c *Call, s *OutputStream) error {
		return through(c, s, c.In.Bytes())
	}),
	"[method]output-stream.flush":          writeFunc(flush),
	"[method]output-stream.blocking-flush": writeFunc(func(c *Call, s *OutputStream) error { return through(c, s, nil) }),
	"[method]output-stream.subscribe":      subscribeOutput,
	"[method]output-stream.write-zeroes": writeFunc(func(c *Call, s *OutputStream) error {
		p, err := zeroesOf(c.In.U64())
		if err != nil {
			return err
		}
		return write(c, s, p)
	}),
	"[method]output-stream.blocking-write-zeroes-and-flush": writeFunc(func(c *Call, s *OutputStream) error {
		p, err := zeroesOf(c.In.U64())
		if err != nil {
			return err
		}
		return through(c, s, p)
	}),
	"[method]output-stream.splice":          writeFunc(splice(false)),
	"[method]output-stream.blocking-splice": writeFunc(splice(true)),
}

var errorFuncs = map[string]Func{
	"[method]error.to-debug-string": func(c *Call) error {
		e, err := Get[*StreamError](c.State, c.In.U32())
		if err != nil {
			return err
		}
		c.Out = wit.AppendString(c.Out, e.Cause.Error())
		return nil
	},
}

// stdout returns the implementation of get-stdout or get-stderr.
func stdout(of func(o Options) io.Writer) Func {
	return func(c *Call) error {
		to := of(c.options)
		if to == nil {
			to = io.Discard
		}
		c.Own(&OutputStream{Output: direct{to}})
		return nil
	}
}

// stdin returns a stream that reads ahead in a goroutine. The goroutine ends when reading Options.Stdin fails or
// returns io.EOF. Whoever provides Options.Stdin must make sure that this happens. All calls by one instance return
// streams on the same Reader.
func stdin(c *Call) error {
	s := &InputStream{Input: Empty{}}
	if from := c.options.Stdin; from != nil {
		if c.State.stdin == nil {
			c.State.stdin = NewReader(from, c.Wake)
		}
		s.Input = c.State.stdin.Background()
	}
	c.Own(s)
	return nil
}

// Discard reads a stream to its end or its first error. It ignores an error of the stream, and returns only an error
// that ends the guest's call.
func (c *Call) Discard(in Input) error {
	for s := (&InputStream{Input: in}); ; {
		if _, err := c.read(s, maxRead, true); isCallError(err) {
			return err
		} else if err != nil {
			return nil
		}
	}
}

// Drain sends what was written to an output, and waits until that is done. It ignores an error of the output, and
// returns only an error that ends the guest's call.
func (c *Call) Drain(out Output) error {
	out.Flush()
	return c.wait(c, When(out.Idle))
}
