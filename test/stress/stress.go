package stress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
)

// Method is a method under stress.
type Method struct {
	// Procedure is the path of the method's requests, /package.Service/Method.
	Procedure string
	Type      connect.StreamType
	// Base maps the name of a Transport to the base URL of the method, such as https://127.0.0.1:443.
	Base map[string]string
	// Exchange returns the requests of one call and the expected replies, in protobuf's binary encoding. It builds the
	// messages from the given words. Each word names the client. In a direction without streaming there is one message.
	Exchange func(words []string) (requests, replies [][]byte)
}

// Transport is a way to reach a server.
type Transport struct {
	Name   string
	Client *http.Client
	// HTTP1 means that the transport supports neither gRPC (which needs trailers) nor bidirectional streams.
	HTTP1 bool
}

// Options set the amount of stress.
type Options struct {
	// Streams is the number of concurrent calls. Run continues at least for the time in the field For, and until it has
	// received the number of replies in the field Messages.
	Streams  int
	Messages int64
	For      time.Duration
}

const (
	// callTimeout limits a call, so that a call that hangs is an error instead of a timeout of the test.
	callTimeout = 2 * time.Minute
	// compressFrom is the minimum size, in bytes, of messages that clients compress. The limit saves memory, because
	// each compressor needs almost a megabyte.
	compressFrom = 1024
)

// protocols maps the name of a protocol to the options of its clients.
var protocols = map[string][]connect.ClientOption{
	"grpc":         {connect.WithGRPC()},
	"grpc+gzip":    {connect.WithGRPC(), connect.WithSendGzip()},
	"grpcweb":      {connect.WithGRPCWeb()},
	"grpcweb+gzip": {connect.WithGRPCWeb(), connect.WithSendGzip()},
	"connect":      {},
	"connect+gzip": {connect.WithSendGzip()},
}

// client calls one method in one protocol over one transport.
type client struct {
	*connect.Client[message, message]
	*Method
	name     string
	answered atomic.Bool
}

// clients returns a client for each combination of method, transport and protocol.
func clients(methods []*Method, transports []Transport) []*client {
	var all []*client
	for _, m := range methods {
		for _, t := range transports {
			for protocol, options := range protocols {
				grpc := strings.HasPrefix(protocol, "grpc") && !strings.HasPrefix(protocol, "grpcweb")
				if t.HTTP1 && (grpc || m.Type == connect.StreamTypeBidi) {
					continue
				}
				all = append(all, &client{
					Client: connect.NewClient[message, message](t.Client, m.Base[t.Name]+m.Procedure,
						append(options, connect.WithCodec(codec{}), connect.WithCompressMinBytes(compressFrom))...),
					Method: m, name: protocol + "/" + t.Name + m.Procedure,
				})
			}
		}
	}
	return all
}

// run is the state of one Run.
type run struct {
	Options
	t        testing.TB
	clients  []*client
	started  time.Time
	messages atomic.Int64 // correct replies
	bad      atomic.Int64 // failed calls
	answered atomic.Int64 // clients that got a complete answer
}

// maxReported limits the number of failed calls that are reported.
const maxReported = 10

// Run calls all methods over all transports in all protocols, with o.Streams concurrent calls, and fails t for each
// wrong reply. It cancels some calls in the middle, as disconnecting clients do. Run ends once the limits in the
// options are reached and every client has had an answer.
func Run(t testing.TB, methods []*Method, transports []Transport, o Options) {
	t.Helper()
	r := &run{Options: o, t: t, clients: clients(methods, transports), started: time.Now()}
	var wg sync.WaitGroup
	for stream := range o.Streams {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(stream), 0))
			for call := 0; !r.enough(); call++ {
				c := r.clients[(stream+call)%len(r.clients)]
				r.call(c, fmt.Sprintf("%s stream %d call %d", c.name, stream, call), random)
			}
		})
	}
	wg.Wait()
	t.Logf("%d replies to %d kinds of clients with %d concurrent calls in %v; %d calls failed",
		r.messages.Load(), len(r.clients), o.Streams, time.Since(r.started).Round(time.Millisecond), r.bad.Load())
}

func (r *run) enough() bool {
	return r.bad.Load() >= maxReported || r.t.Context().Err() != nil ||
		time.Since(r.started) >= r.For && r.messages.Load() >= r.Messages && r.answered.Load() == int64(len(r.clients))
}

// call makes one call.
func (r *run) call(c *client, owner string, random *rand.Rand) {
	ctx, cancel := context.WithTimeout(r.t.Context(), callTimeout)
	defer cancel()
	requests, replies := c.Exchange(words(owner, random))
	leaveAfter := len(replies)
	if random.IntN(16) == 0 {
		leaveAfter = random.IntN(len(replies) + 1)
		if len(replies) == 1 { // cancel while the call waits for its only reply
			time.AfterFunc(time.Duration(random.IntN(2000))*time.Microsecond, cancel)
		}
	}
	seen := 0
	err := c.exchange(ctx, requests, func(reply []byte) error {
		if seen >= len(replies) || !bytes.Equal(reply, replies[seen]) {
			return &foreignError{reply, seen, len(replies)}
		}
		r.messages.Add(1)
		if seen++; seen == leaveAfter && seen < len(replies) {
			cancel()
		}
		return nil
	})
	foreign, isForeign := errors.AsType[*foreignError](err)
	switch {
	case isForeign:
		r.wrong("%s got the bytes of another call: %v", owner, foreign)
	case ctx.Err() == context.Canceled: // this client has cancelled the call
	case err != nil:
		r.wrong("%s: %v", owner, err)
	case seen < len(replies):
		r.wrong("%s: got %d replies, want %d", owner, seen, len(replies))
	case c.answered.CompareAndSwap(false, true):
		r.answered.Add(1)
	}
}

func (r *run) wrong(format string, args ...any) {
	if r.bad.Add(1) <= maxReported {
		r.t.Errorf(format, args...)
	}
}

// foreignError reports a message that belongs to another call.
type foreignError struct {
	message []byte
	n, of   int
}

func (e *foreignError) Error() string {
	return fmt.Sprintf("message %d of %d, %d bytes: %.200q", e.n, e.of, len(e.message), e.message)
}

// words returns the content of a call. Most words are short. Some are so long that the libraries use larger buffers.
func words(owner string, random *rand.Rand) []string {
	all := make([]string, 1+random.IntN(32))
	for i := range all {
		size := 0
		switch random.IntN(256) {
		case 0:
			size = random.IntN(70 << 10)
		case 1, 2, 3, 4:
			size = random.IntN(6 << 10)
		}
		word := fmt.Sprintf("[%s word %d]", owner, i)
		all[i] = strings.Repeat(word, 1+size/len(word))
	}
	return all
}

// exchange sends the requests, and passes each reply to the given function. It stops at the first error from that
// function.
func (c *client) exchange(ctx context.Context, requests [][]byte, take func([]byte) error) error {
	switch c.Type {
	case connect.StreamTypeBidi:
		return c.converse(ctx, requests, take)
	case connect.StreamTypeServer:
		stream, err := c.CallServerStream(ctx, connect.NewRequest(&message{requests[0]}))
		if err != nil {
			return err
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			if err := take(stream.Msg().bytes); err != nil {
				return err
			}
		}
		return stream.Err()
	case connect.StreamTypeClient:
		stream := c.CallClientStream(ctx)
		for _, m := range requests {
			if err := stream.Send(&message{m}); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
		}
		return takeOne(stream.CloseAndReceive())(take)
	default:
		return takeOne(c.CallUnary(ctx, connect.NewRequest(&message{requests[0]})))(take)
	}
}

func takeOne(reply *connect.Response[message], err error) func(take func([]byte) error) error {
	return func(take func([]byte) error) error {
		if err != nil {
			return err
		}
		return take(reply.Msg.bytes)
	}
}

// converse sends and receives at the same time.
func (c *client) converse(ctx context.Context, requests [][]byte, take func([]byte) error) error {
	stream := c.CallBidiStream(ctx)
	sent := make(chan error, 1)
	go func() {
		for _, m := range requests {
			if err := stream.Send(&message{m}); err != nil {
				break // the receiver gets the reason
			}
		}
		sent <- stream.CloseRequest()
	}()
	err := func() error {
		for {
			m, err := stream.Receive()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil {
				err = take(m.bytes)
			}
			if err != nil {
				return err
			}
		}
	}()
	closeErr := stream.CloseResponse()
	<-sent
	if err == nil {
		err = closeErr
	}
	return err
}

// message is a message in protobuf's binary encoding.
type message struct{ bytes []byte }

// codec passes the bytes on unchanged.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(m any) ([]byte, error) { return bytes.Clone(m.(*message).bytes), nil } // connect-go keeps the result

func (codec) Unmarshal(b []byte, m any) error {
	m.(*message).bytes = bytes.Clone(b) // connect-go reuses b
	return nil
}
