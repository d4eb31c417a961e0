package wasihttp

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"strings"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The resources of wasi:http/types, except fields and outgoing-body.
type (
	incomingRequest struct {
		*exchange
		consumed bool
	}
	incomingBody struct {
		bodySource
		streamed bool
	}
	futureTrailers struct {
		bodySource
		given bool
	}
	outparam         struct{ *exchange }
	outgoingResponse struct {
		status  int
		headers *fields
		body    *outBody
	}
)

// Close releases the headers. The body is a separate resource, but without a response it is never sent.
func (o *outgoingResponse) Close() error {
	o.body.lose()
	return o.headers.Close()
}

// Close is called when the guest drops the body. A future-trailers takes over its source.
func (b *incomingBody) Close() error {
	b.release()
	return nil
}

// Close is called when the guest drops the future.
func (t *futureTrailers) Close() error {
	t.release()
	return nil
}

// on makes a method of a resource from the given function.
func on[T any](do func(c *wasi.Call, self T) error) wasi.Func {
	return func(c *wasi.Call) error {
		self, err := wasi.Get[T](c.State, c.In.U32())
		if err != nil {
			return err
		}
		return do(c, self)
	}
}

// once writes a result<T>. The first time, the result is the resource; afterwards, it is an error.
func once(c *wasi.Call, given *bool, resource func() any) error {
	if *given {
		c.Failed()
		return nil
	}
	*given = true
	c.OK()
	c.Own(resource())
	return nil
}

// methods are the cases of the variant method, except the last case. The last case is "other", and its payload is the
// method's name.
var methods = []string{"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}

func appendMethod(dst []byte, method string) []byte {
	for i, m := range methods {
		if m == method {
			return wit.AppendCase(dst, i)
		}
	}
	return wit.AppendString(wit.AppendCase(dst, len(methods)), method)
}

func optional(c *wasi.Call, s string) {
	c.Out = wit.AppendOption(c.Out, s != "")
	if s != "" {
		c.Out = wit.AppendString(c.Out, s)
	}
}

var requestFuncs = map[string]wasi.Func{
	"[method]incoming-request.method": on(func(c *wasi.Call, q *incomingRequest) error {
		c.Out = appendMethod(c.Out, q.r.Method)
		return nil
	}),
	"[method]incoming-request.path-with-query": on(func(c *wasi.Call, q *incomingRequest) error {
		optional(c, strings.ToValidUTF8(q.r.URL.RequestURI(), "\uFFFD"))
		return nil
	}),
	"[method]incoming-request.scheme": on(func(c *wasi.Call, q *incomingRequest) error {
		c.Out = wit.AppendOption(c.Out, true)
		if q.r.TLS != nil {
			c.Out = wit.AppendCase(c.Out, 1)
		} else {
			c.Out = wit.AppendCase(c.Out, 0)
		}
		return nil
	}),
	"[method]incoming-request.authority": on(func(c *wasi.Call, q *incomingRequest) error {
		optional(c, strings.ToValidUTF8(q.r.Host, "\uFFFD"))
		return nil
	}),
	"[method]incoming-request.headers": on(func(c *wasi.Call, q *incomingRequest) error {
		return ownFields(c, fieldsOf(q.r.Header), true)
	}),
	"[method]incoming-request.consume": on(func(c *wasi.Call, q *incomingRequest) error {
		return once(c, &q.consumed, func() any { return &incomingBody{bodySource: q.exchange} })
	}),
	"[method]incoming-body.stream": on(func(c *wasi.Call, b *incomingBody) error {
		return once(c, &b.streamed, func() any { return &wasi.InputStream{Input: b.input()} })
	}),
	"[static]incoming-body.finish": func(c *wasi.Call) error {
		b, err := wasi.Take[*incomingBody](c.State, c.In.U32())
		if err != nil {
			return err
		}
		c.Own(&futureTrailers{bodySource: b.bodySource})
		return nil
	},
	// Trailers arrive at the end of the body. The pollable is always ready, because future-trailers.get itself waits
	// for the end.
	"[method]future-trailers.subscribe": on(func(c *wasi.Call, t *futureTrailers) error {
		c.Own(wasi.When(func() bool { return true }))
		return nil
	}),
	"[method]future-trailers.get": on(trailersGet),
}

// trailersGet writes an option<result<result<option<trailers>, error-code>>>. The option is always some.
func trailersGet(c *wasi.Call, t *futureTrailers) error {
	c.Out = wit.AppendOption(c.Out, true)
	if t.given {
		c.Failed()
		return nil
	}
	t.given = true
	if err := c.Discard(t.input()); err != nil {
		return err
	}
	trailers, err := t.trailers()
	c.OK()
	if err != nil {
		failedWithCode(c, CodeOf(err))
		return nil
	}
	c.OK()
	c.Out = wit.AppendOption(c.Out, len(trailers) > 0)
	if len(trailers) > 0 {
		return ownFields(c, fieldsOf(trailers), true)
	}
	return nil
}

var responseFuncs = map[string]wasi.Func{
	"[constructor]outgoing-response": func(c *wasi.Call) error {
		headers, err := wasi.Take[*fields](c.State, c.In.U32())
		if err != nil {
			return err
		}
		c.Own(&outgoingResponse{status: http.StatusOK, headers: headers})
		return nil
	},
	"[method]outgoing-response.status-code": on(func(c *wasi.Call, o *outgoingResponse) error {
		c.Out = wit.AppendU16(c.Out, uint16(o.status))
		return nil
	}),
	"[method]outgoing-response.set-status-code": on(func(c *wasi.Call, o *outgoingResponse) error {
		status := int(c.In.U16())
		if status < 200 || status > 999 { // 1xx is sent by send-informational
			c.Failed()
			return nil
		}
		o.status = status
		c.OK()
		return nil
	}),
	"[method]outgoing-response.headers": on(func(c *wasi.Call, o *outgoingResponse) error {
		return ownFields(c, o.headers.list, true)
	}),
	"[method]outgoing-response.body": on(func(c *wasi.Call, o *outgoingResponse) error {
		given := o.body != nil
		return once(c, &given, func() any { o.body = newOutBody(c.State); return o.body })
	}),
	"[method]outgoing-body.write": on(func(c *wasi.Call, b *outBody) error {
		return once(c, &b.taken, func() any {
			if b.stream != nil {
				return &wasi.OutputStream{Output: b.output()}
			}
			return &wasi.OutputStream{Output: &b.early}
		})
	}),
	"[static]outgoing-body.finish":                 bodyFinish,
	"[static]response-outparam.set":                outparamSet,
	"[method]response-outparam.send-informational": on(sendInformational),
	"http-error-code": func(c *wasi.Call) error {
		e, err := wasi.Get[*wasi.StreamError](c.State, c.In.U32())
		if err != nil {
			return err
		}
		code, ok := errors.AsType[*CodeError](e.Cause)
		if errors.Is(e.Cause, errTooLong) {
			code, ok = &CodeError{Code: "HTTP-response-body-size"}, true
		}
		c.Out = wit.AppendOption(c.Out, ok)
		if ok {
			c.Out = appendCode(c.Out, code)
		}
		return nil
	},
}

func bodyFinish(c *wasi.Call) error {
	b, err := wasi.Take[*outBody](c.State, c.In.U32())
	if err != nil {
		return err
	}
	var trailers *fields
	if c.In.Option() {
		if trailers, err = wasi.Take[*fields](c.State, c.In.U32()); err != nil {
			return err
		}
	}
	if err := b.finish(c, trailers); err != nil {
		if cause := context.Cause(c); cause != nil {
			return cause
		}
		code, ok := errors.AsType[*CodeError](err)
		if !ok {
			code = &CodeError{Code: "HTTP-response-body-size"}
		}
		failedWithCode(c, code)
		return nil
	}
	c.OK()
	return nil
}

// outparamSet reads a result<outgoing-response, error-code>, and begins the response or records the error.
func outparamSet(c *wasi.Call) error {
	p, err := wasi.Take[*outparam](c.State, c.In.U32())
	if err != nil {
		return err
	}
	if p.ended {
		return errEnded
	}
	if failed := c.In.Option(); failed { // a result is encoded like an option, with 1 for an error
		p.failed = readCode(c.In)
		return c.In.Err()
	}
	response, err := wasi.Take[*outgoingResponse](c.State, c.In.U32())
	if err != nil {
		return err
	}
	p.begin(response)
	return response.Close()
}

// sendInformational sends a 1xx response before the final one (early hints, RFC 8297).
func sendInformational(c *wasi.Call, p *outparam) error {
	if p.ended {
		return errEnded
	}
	status := int(c.In.U16())
	headers, err := wasi.Take[*fields](c.State, c.In.U32())
	if err != nil {
		return err
	}
	defer headers.Close()
	if status < 100 || status > 199 || status == http.StatusSwitchingProtocols {
		c.FailedWith(caseOf("HTTP-protocol-error"))
		return nil
	}
	servers := p.w.Header().Clone()
	p.copyHeader(headers.list)
	p.w.WriteHeader(status)
	clear(p.w.Header())
	maps.Copy(p.w.Header(), servers)
	c.OK()
	return nil
}
