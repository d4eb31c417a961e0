package guestagent

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// errHostGone ends the session of a host that has left.
var errHostGone = errors.New("the host is gone")

// server serves one host after another.
type server struct {
	port    io.Reader
	out     *wire.LockedWriter
	version string
	service Service // may be nil

	mux  *wire.Mux // the session; may be nil
	jobs sync.WaitGroup
}

// Serve serves the hosts that connect to the given port, until the port fails. A read from the port must return io.EOF
// when the host has left. The next write must then wait until another host connects, as port.Write does. Serve tells
// each host the given version. The service may be nil.
func Serve(port io.ReadWriter, version string, service Service) error {
	s := &server{port: port, out: &wire.LockedWriter{W: port}, version: version, service: service}
	defer s.jobs.Wait()
	defer s.end(errHostGone)
	frames := wire.NewReader(port)
	if err := s.ready(); err != nil {
		return err
	}
	for {
		f, err := frames.Next()
		switch {
		case errors.Is(err, io.EOF):
			s.end(errHostGone)
			if err := s.ready(); err != nil {
				return err
			}
		case err != nil:
			return err
		case f.Kind == wire.KindHello:
			s.hello(f)
		case s.mux == nil || f.Session != s.mux.Session():
			// a frame of an earlier session
		case f.Stream == 0:
			if f.Kind == wire.KindPing {
				s.mux.Urgent(0, wire.KindPong, f.Payload)
			}
		default:
			if err := s.handle(f); err != nil {
				s.end(err)
				if err := s.ready(); err != nil {
					return err
				}
			}
		}
	}
}

// ready tells the host that there is no session. It first writes a zero byte, to end any incomplete earlier frame.
func (s *server) ready() error {
	_, err := s.out.Write(wire.AppendFrame([]byte{0}, 0, 0, wire.KindReady))
	return err
}

// end ends the session, and with it the session's jobs.
func (s *server) end(err error) {
	if s.mux != nil {
		s.mux.End(err)
		s.mux = nil
	}
}

// hello begins a session, unless the host repeats the Hello of the current session.
func (s *server) hello(f wire.Frame) {
	var hello wire.Hello
	if hello.Parse(f.Payload) != nil {
		return
	}
	if s.mux == nil || s.mux.Session() != f.Session {
		s.end(errHostGone)
		s.mux = wire.NewMux(f.Session, control)
		go s.mux.Write(s.out)
	}
	welcome := wire.Welcome{Version: min(hello.MaxVersion, wire.MaxVersion), Program: s.version}
	if welcome.Version < max(hello.MinVersion, wire.MinVersion) {
		welcome.Version = 0
	}
	s.mux.Urgent(0, wire.KindWelcome, welcome.Append(nil))
}

func (s *server) handle(f wire.Frame) error {
	if f.Kind != wire.KindOpen {
		return s.mux.Handle(f)
	}
	if len(f.Payload) == 0 {
		return wire.ErrSession
	}
	stream, err := s.mux.Accept(f.Stream)
	if errors.Is(err, wire.ErrTooMany) {
		s.mux.Urgent(f.Stream, wire.KindResult, wire.Result{Class: wire.ClassExhausted, Message: err.Error()}.Append(nil))
		return nil
	}
	if err != nil {
		return err
	}
	op, request := wire.Op(f.Payload[0]), append([]byte(nil), f.Payload[1:]...)
	j := &job{stream: stream}
	stream.SetValue(j)
	s.jobs.Go(func() {
		result := j.run(op, request, s.version, s.service)
		stream.Send(nil, wire.KindResult, result.Append(nil))
		stream.Finish()
	})
	return nil
}

// control handles those frames of a stream that Mux.Handle leaves to it.
func control(stream *wire.Stream, f wire.Frame) error {
	switch f.Kind {
	case wire.KindCancel:
		stream.Finish()
	case wire.KindResize:
		if len(f.Payload) != 4 {
			return wire.ErrSession
		}
		if j, ok := stream.Value().(*job); ok {
			j.resize(binary.BigEndian.Uint16(f.Payload), binary.BigEndian.Uint16(f.Payload[2:]))
		}
	}
	return nil // also for frame kinds of a newer protocol
}
