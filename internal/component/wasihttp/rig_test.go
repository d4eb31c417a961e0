package wasihttp

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

const (
	types   = "wasi:http/types"
	streams = "wasi:io/streams"
	polls   = "wasi:io/poll"
)

// guest plays a guest: it calls host functions with flat values, and checks these against the types. An error of a host
// function ends it, like a trap.
type guest struct {
	t   testing.TB
	ctx context.Context
	*Session
}

type trap struct{ error }

func (g *guest) call(iface, name string, params ...[]byte) *wit.Reader {
	_, bound := interfaces()
	i := slices.IndexFunc(bound, func(b wasi.Bound) bool { return b.Interface == iface+"@0.2.12" && b.Name == name })
	if i < 0 {
		panic("no function " + iface + "#" + name)
	}
	args := slices.Concat(params...)
	check := wit.NewReader(args)
	for _, p := range bound[i].Params {
		check.Check(p)
	}
	if check.Err() != nil || len(check.Rest()) > 0 {
		g.t.Errorf("%s: the test passes wrong parameters: %v, %d bytes left", name, check.Err(), len(check.Rest()))
	}
	out, err := bound[i].Invoke(g.ctx, g.state, args, nil)
	if err != nil {
		panic(trap{err})
	}
	out = slices.Clone(out)
	if r := wit.NewReader(out); bound[i].Result != nil {
		if r.Check(bound[i].Result); r.Err() != nil || len(r.Rest()) > 0 {
			g.t.Errorf("%s returned %x, which is not a %v: %v", name, out, bound[i].Result, r.Err())
		}
	} else if len(out) > 0 {
		g.t.Errorf("%s returned %x, want no result", name, out)
	}
	return wit.NewReader(out)
}

func u16(v uint16) []byte     { return wit.AppendU16(nil, v) }
func u32(v uint32) []byte     { return wit.AppendU32(nil, v) }
func u64(v uint64) []byte     { return wit.AppendU64(nil, v) }
func str(s string) []byte     { return wit.AppendString(nil, s) }
func some(b []byte) []byte    { return append(wit.AppendOption(nil, true), b...) }
func none() []byte            { return wit.AppendOption(nil, false) }
func isOK(r *wit.Reader) bool { return r.Case(2) == 0 }

// ok requires a result to be ok.
func (g *guest) ok(r *wit.Reader) *wit.Reader {
	if !isOK(r) {
		panic(trap{errFailed(r.Rest())})
	}
	return r
}

type errFailed []byte

func (e errFailed) Error() string { return "a host function gave an error" }

// fields makes a fields resource of names and values.
func (g *guest) fields(pairs ...string) uint32 {
	list := wit.AppendLen(nil, len(pairs)/2)
	for _, s := range pairs {
		list = wit.AppendString(list, s)
	}
	return g.ok(g.call(types, "[static]fields.from-list", list)).U32()
}

// respond sets the response and returns its body.
func (g *guest) respond(out uint32, status uint16, headers ...string) (body uint32) {
	response := g.call(types, "[constructor]outgoing-response", u32(g.fields(headers...))).U32()
	g.ok(g.call(types, "[method]outgoing-response.set-status-code", u32(response), u16(status)))
	body = g.ok(g.call(types, "[method]outgoing-response.body", u32(response))).U32()
	g.call(types, "[static]response-outparam.set", u32(out), u32(0), u32(response))
	return body
}

func (g *guest) stream(body uint32) uint32 {
	return g.ok(g.call(types, "[method]outgoing-body.write", u32(body))).U32()
}

// write writes and waits until it is done. It returns false when the stream is closed.
func (g *guest) write(stream uint32, s string) bool {
	return isOK(g.call(streams, "[method]output-stream.blocking-write-and-flush", u32(stream), str(s)))
}

func (g *guest) finish(body uint32, trailers ...string) bool {
	t := none()
	if trailers != nil {
		t = some(u32(g.fields(trailers...)))
	}
	return isOK(g.call(types, "[static]outgoing-body.finish", u32(body), t))
}

// input returns the stream of the request's body.
func (g *guest) input(request uint32) (body, stream uint32) {
	body = g.ok(g.call(types, "[method]incoming-request.consume", u32(request))).U32()
	return body, g.ok(g.call(types, "[method]incoming-body.stream", u32(body))).U32()
}

// read waits for a piece and returns it, or false at the end.
func (g *guest) read(stream uint32) (string, bool) {
	r := g.call(streams, "[method]input-stream.blocking-read", u32(stream), u64(64<<10))
	if !isOK(r) {
		return "", false
	}
	return r.String(), true
}

// outcome is the result of Serve.
type outcome struct{ err error }

// serve starts a server whose requests the guest answers, over HTTP/1.1 or HTTP/2.
func serve(t *testing.T, h2 bool, handle func(g *guest, request, out uint32)) (*httptest.Server, chan outcome) {
	t.Helper()
	outcomes := make(chan outcome, 100)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s := NewSession(wasi.Options{})
		defer s.Close()
		err := s.Serve(w, r, func(ctx context.Context, params []byte) error {
			return play(&guest{t, ctx, s}, params, handle)
		})
		outcomes <- outcome{err}
		if err != nil {
			Fail(w, err)
		}
	}))
	server.EnableHTTP2 = h2
	if h2 {
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	return server, outcomes
}

func play(g *guest, params []byte, handle func(g *guest, request, out uint32)) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case trap:
			err = p.error
		default:
			panic(p)
		}
	}()
	r := wit.NewReader(params)
	handle(g, r.U32(), r.U32())
	return nil
}
