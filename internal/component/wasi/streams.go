package wasi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// InputStream and OutputStream are the resources of wasi:io/streams; StreamError is that of wasi:io/error.
type InputStream struct {
	Input
	failed bool
}

// OutputStream is documented at InputStream.
type OutputStream struct {
	Output
	failed bool
}

// StreamError is documented at InputStream.
type StreamError struct{ Cause error }

// maxRead is how much one read gives at most: what it gives is copied into the guest's memory at once.
const maxRead = window

// most is a length that the guest names, as far as a call goes in one piece.
func most(n uint64) int { return int(min(n, maxRead)) }

// streamFailed writes the error of a stream's operation: what happened, the first time; afterwards, that it is closed.
func (c *Call) streamFailed(failed *bool, err error) {
	if *failed || errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) {
		c.FailedWith(1) // closed
		return
	}
	*failed = true
	c.FailedWith(0) // last-operation-failed
	c.Own(&StreamError{err})
}

// read gives up to n bytes; with wait it waits for the first.
func (c *Call) read(s *InputStream, n int, wait bool) ([]byte, error) {
	if wait && n > 0 {
		s.Fill()
		if err := c.wait(c, When(s.Ready)); err != nil {
			return nil, &interrupted{err}
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

// interrupted is an error that ends the guest's call, not an error of a stream.
type interrupted struct{ error }

func (i *interrupted) Unwrap() error { return i.error }

func ended(err error) bool {
	i, ok := errors.AsType[*interrupted](err)
	return ok && i != nil
}

// reads makes the four functions that read; give writes what was read.
func reads(wait bool, give func(c *Call, data []byte)) Func {
	return func(c *Call) error {
		s, err := Get[*InputStream](c.State, c.In.U32())
		if err != nil {
			return err
		}
		data, err := c.read(s, most(c.In.U64()), wait)
		switch {
		case ended(err):
			return err
		case err != nil:
			c.streamFailed(&s.failed, err)
		default:
			c.OK()
			give(c, data)
		}
		return nil
	}
}

func giveBytes(c *Call, data []byte) { c.Out = wit.AppendBytes(c.Out, data) }

func giveLength(c *Call, data []byte) { c.Out = wit.AppendU64(c.Out, uint64(len(data))) }

// subscribeInput is ready when a read would give something, and has it read ahead until then.
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

// writes makes a function of an output-stream.
func writes(do func(c *Call, s *OutputStream) error) Func {
	return func(c *Call) error {
		s, err := Get[*OutputStream](c.State, c.In.U32())
		if err != nil {
			return err
		}
		err = do(c, s)
		if err == nil || ended(err) {
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

// write takes what check-write has allowed; more is the guest's mistake, and ends it.
func write(c *Call, s *OutputStream, p []byte) error {
	n, err := s.Room()
	if err != nil {
		return err
	}
	if len(p) > n {
		return &interrupted{fmt.Errorf("%d bytes were written where %d were allowed", len(p), n)}
	}
	if err := s.Write(p); err != nil {
		return err
	}
	c.OK()
	return nil
}

// through writes and waits until it has gone.
func through(c *Call, s *OutputStream, p []byte) error {
	for done := false; !done; {
		if err := c.wait(c, When(s.Idle)); err != nil {
			return &interrupted{err}
		}
		var err error
		done, err = s.Through(p)
		if err != nil && c.Err() != nil {
			return &interrupted{context.Cause(c)}
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

// zeroesOf are as many zeroes as the guest asks to have written; more than a window is never allowed.
func zeroesOf(n uint64) ([]byte, error) {
	if n > window {
		return nil, &interrupted{fmt.Errorf("%d zeroes were written where %d are allowed at most", n, window)}
	}
	return zeroes[:n], nil
}

// splice moves bytes from one stream to another; with wait it waits for both.
func splice(wait bool) func(c *Call, to *OutputStream) error {
	return func(c *Call, to *OutputStream) error {
		from, err := Get[*InputStream](c.State, c.In.U32())
		if err != nil {
			return &interrupted{err}
		}
		n := most(c.In.U64())
		room := func() bool { free, err := to.Room(); return free > 0 || err != nil }
		if wait && n > 0 && !room() {
			to.Flush()
			if err := c.wait(c, When(room)); err != nil {
				return &interrupted{err}
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
		giveLength(c, data)
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
	"[method]input-stream.read":          reads(false, giveBytes),
	"[method]input-stream.blocking-read": reads(true, giveBytes),
	"[method]input-stream.skip":          reads(false, giveLength),
	"[method]input-stream.blocking-skip": reads(true, giveLength),
	"[method]input-stream.subscribe":     subscribeInput,

	"[method]output-stream.check-write": writes(checkWrite),
	"[method]output-stream.write":       writes(func(c *Call, s *OutputStream) error { return write(c, s, c.In.Bytes()) }),
	"[method]output-stream.blocking-write-and-flush": writes(func(c *Call, s *OutputStream) error {
		return through(c, s, c.In.Bytes())
	}),
	"[method]output-stream.flush":          writes(flush),
	"[method]output-stream.blocking-flush": writes(func(c *Call, s *OutputStream) error { return through(c, s, nil) }),
	"[method]output-stream.subscribe":      subscribeOutput,
	"[method]output-stream.write-zeroes": writes(func(c *Call, s *OutputStream) error {
		p, err := zeroesOf(c.In.U64())
		if err != nil {
			return err
		}
		return write(c, s, p)
	}),
	"[method]output-stream.blocking-write-zeroes-and-flush": writes(func(c *Call, s *OutputStream) error {
		p, err := zeroesOf(c.In.U64())
		if err != nil {
			return err
		}
		return through(c, s, p)
	}),
	"[method]output-stream.splice":          writes(splice(false)),
	"[method]output-stream.blocking-splice": writes(splice(true)),
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

// stdio makes the function that gives a standard stream.
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

// stdin reads ahead in a goroutine that ends when the reader does: whoever gives one has to see to that. However often the guest
// asks, what it reads is the same.
func stdin(c *Call) error {
	s := &InputStream{Input: Empty{}}
	if from := c.options.Stdin; from != nil {
		if c.State.stdin == nil {
			c.State.stdin = NewReader(from, c.Wake)
		}
		s.Input = background{c.State.stdin}
	}
	c.Own(s)
	return nil
}

// background is a Reader that never holds up the guest's thread, where its end would not be noticed.
type background struct{ *Reader }

func (b background) Fill() { b.Begin() }

// Discard reads a stream to its end. An error of the stream is its end; the error is that of the guest's call.
func (c *Call) Discard(in Input) error {
	for s := (&InputStream{Input: in}); ; {
		if _, err := c.read(s, maxRead, true); ended(err) {
			return err
		} else if err != nil {
			return nil
		}
	}
}
