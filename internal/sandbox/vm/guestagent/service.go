package guestagent

import (
	"io"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Service serves the calls of OpService in a guest that runs containers. It returns when the call has ended, also if
// that is because Call.Done was closed. The result has an exit code or an error.
type Service func(Call) wire.Result

// Call is one call of a Service.
type Call struct {
	Request []byte
	// In ends when the host closes it. Out and Err lead to the host; writes wait until the host reads.
	In       io.Reader
	Out, Err io.Writer
	// Done is closed when the host no longer waits for the call.
	Done <-chan struct{}
	// OnResize sets the function that is called with each size of the client's terminal. It may be called at once.
	OnResize func(sized func(columns, rows uint16))
}

// serve serves a call.
func (j *job) serve(request []byte, service Service) wire.Result {
	j.stream.Grant(wire.ChannelIn)
	defer j.setTerminal(nil)
	result := service(Call{
		Request: request, In: channel{j.stream, wire.ChannelIn}, Out: channel{j.stream, wire.ChannelOut}, Err: channel{j.stream, wire.ChannelErr},
		Done: j.stream.Done(), OnResize: j.setTerminal,
	})
	j.stream.Close(wire.ChannelOut)
	j.stream.Close(wire.ChannelErr)
	return result
}

// channel is a channel of a stream.
type channel struct {
	stream *wire.Stream
	number byte
}

func (c channel) Read(p []byte) (int, error)  { return c.stream.Read(c.number, p, nil) }
func (c channel) Write(p []byte) (int, error) { return c.stream.Write(c.number, p, nil) }
