package wasihttp

import (
	"bytes"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The resources of outgoing requests. No request is ever sent.
type (
	outgoingRequest struct {
		properties
		headers *fields
		body    bool
	}
	requestOptions struct {
		properties
		state *wasi.State
	}
	incomingResponse       struct{} // never exists
	futureIncomingResponse struct{} // never exists
)

// properties are the values that the guest has set, in flat form. Their size counts towards the State's limit (see
// Hold).
type properties map[string][]byte

func (p properties) set(s *wasi.State, name string, v []byte) bool {
	if !s.Hold(len(v) - len(p[name])) {
		return false
	}
	p[name] = bytes.Clone(v)
	return true
}

func (p properties) free(s *wasi.State) {
	for _, v := range p {
		s.Hold(-len(v))
	}
	clear(p)
}

// Close releases the options. It is called when the guest drops them.
func (o *requestOptions) Close() error {
	o.free(o.state)
	return nil
}

// Close releases the request. It is called when the guest drops the request or the host denies it.
func (q *outgoingRequest) Close() error {
	q.free(q.headers.state)
	return q.headers.Close()
}

func (p properties) get(name string) []byte {
	if v := p[name]; v != nil {
		return v
	}
	return wit.AppendCase(nil, 0) // no value; for the property "method", this means GET
}

// property adds the getter and the setter of a property to the map funcs.
func property[T interface {
	set(*wasi.State, string, []byte) bool
	get(string) []byte
}](funcs map[string]wasi.Func, resource, name string) {
	funcs["[method]"+resource+"."+name] = on(func(c *wasi.Call, self T) error {
		c.Out = append(c.Out, self.get(name)...)
		return nil
	})
	funcs["[method]"+resource+".set-"+name] = on(func(c *wasi.Call, self T) error {
		if self.set(c.State, name, c.In.Raw(len(c.In.Rest()))) {
			c.OK()
		} else {
			c.Failed()
		}
		return nil
	})
}

// impossible makes a method of a resource that never exists.
func impossible[T any]() wasi.Func {
	return on(func(*wasi.Call, T) error { return nil })
}

func outgoingFuncs() map[string]wasi.Func {
	funcs := map[string]wasi.Func{
		"[constructor]outgoing-request": func(c *wasi.Call) error {
			headers, err := wasi.Take[*fields](c.State, c.In.U32())
			if err != nil {
				return err
			}
			c.Own(&outgoingRequest{properties: properties{}, headers: headers})
			return nil
		},
		"[method]outgoing-request.body": on(func(c *wasi.Call, q *outgoingRequest) error {
			return once(c, &q.body, func() any { return &outBody{} })
		}),
		"[method]outgoing-request.headers": on(func(c *wasi.Call, q *outgoingRequest) error {
			return ownFields(c, q.headers.list, true)
		}),
		"[constructor]request-options": func(c *wasi.Call) error {
			c.Own(&requestOptions{properties{}, c.State})
			return nil
		},
		"[method]incoming-response.status":           impossible[incomingResponse](),
		"[method]incoming-response.headers":          impossible[incomingResponse](),
		"[method]incoming-response.consume":          impossible[incomingResponse](),
		"[method]future-incoming-response.subscribe": impossible[futureIncomingResponse](),
		"[method]future-incoming-response.get":       impossible[futureIncomingResponse](),
	}
	for _, name := range []string{"method", "path-with-query", "scheme", "authority"} {
		property[*outgoingRequest](funcs, "outgoing-request", name)
	}
	for _, name := range []string{"connect-timeout", "first-byte-timeout", "between-bytes-timeout"} {
		property[*requestOptions](funcs, "request-options", name)
	}
	return funcs
}

// deny implements outgoing-handler.handle.
func deny(c *wasi.Call) error {
	request, err := wasi.Take[*outgoingRequest](c.State, c.In.U32())
	if err != nil {
		return err
	}
	defer request.Close()
	if c.In.Option() {
		c.Drop(c.In.U32())
	}
	c.FailedWith(caseOf("HTTP-request-denied"))
	return nil
}
