package wasihttp

import (
	"bytes"
	"cmp"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The resources of outgoing requests.
type (
	outgoingRequest struct {
		properties
		headers *fields
		body    *outBody
	}
	requestOptions struct {
		properties
		state *wasi.State
	}
	futureIncomingResponse struct {
		*call
		given bool
	}
	incomingResponse struct {
		*call
		consumed bool
	}
)

// Close is called when the guest drops the future.
func (f *futureIncomingResponse) Close() error {
	f.release()
	return nil
}

// Close is called when the guest drops the response. It does not release the body, which is a separate resource.
func (r *incomingResponse) Close() error {
	r.release()
	return nil
}

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

// Close releases the request. It is called when the guest drops the request or the host takes it. The body is a separate
// resource, but without a request it is never sent.
func (q *outgoingRequest) Close() error {
	q.body.lose()
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
			given := q.body != nil
			return once(c, &given, func() any { q.body = newOutBody(c.State); return q.body })
		}),
		"[method]outgoing-request.headers": on(func(c *wasi.Call, q *outgoingRequest) error {
			return ownFields(c, q.headers.list, true)
		}),
		"[constructor]request-options": func(c *wasi.Call) error {
			c.Own(&requestOptions{properties{}, c.State})
			return nil
		},
		"[method]incoming-response.status": on(func(c *wasi.Call, r *incomingResponse) error {
			c.Out = wit.AppendU16(c.Out, uint16(r.response.StatusCode))
			return nil
		}),
		"[method]incoming-response.headers": on(func(c *wasi.Call, r *incomingResponse) error {
			return ownFields(c, fieldsOf(r.response.Header), true)
		}),
		"[method]incoming-response.consume": on(func(c *wasi.Call, r *incomingResponse) error {
			return once(c, &r.consumed, func() any {
				r.refs++
				return &incomingBody{bodySource: r.call}
			})
		}),
		"[method]future-incoming-response.subscribe": on(func(c *wasi.Call, f *futureIncomingResponse) error {
			c.Own(wasi.When(f.ready))
			return nil
		}),
		"[method]future-incoming-response.get": on(responseGet),
	}
	for _, name := range []string{"method", "path-with-query", "scheme", "authority"} {
		property[*outgoingRequest](funcs, "outgoing-request", name)
	}
	for _, name := range []string{"connect-timeout", "first-byte-timeout", "between-bytes-timeout"} {
		property[*requestOptions](funcs, "request-options", name)
	}
	return funcs
}

// responseGet writes an option<result<result<incoming-response, error-code>>>.
func responseGet(c *wasi.Call, f *futureIncomingResponse) error {
	ready := f.ready()
	c.Out = wit.AppendOption(c.Out, ready)
	switch {
	case !ready:
		return nil
	case f.given:
		c.Failed()
		return nil
	}
	f.given = true
	c.OK()
	if f.response == nil {
		failedWithCode(c, CodeOf(f.err))
		return nil
	}
	if c.Renew != nil {
		c.Renew()
	}
	c.OK()
	f.refs++
	c.Own(&incomingResponse{call: f.call})
	return nil
}

// send implements outgoing-handler.handle.
func send(c *wasi.Call) error {
	q, err := wasi.Take[*outgoingRequest](c.State, c.In.U32())
	if err != nil {
		return err
	}
	defer q.Close()
	t := timeouts{defaultTimeout, defaultTimeout, defaultTimeout}
	if c.In.Option() {
		o, err := wasi.Take[*requestOptions](c.State, c.In.U32())
		if err != nil {
			return err
		}
		defer o.Close()
		t = o.timeouts()
	}
	request, code := q.build()
	size := CallSize
	if code == nil {
		size += requestSize(request, q.body)
	}
	switch {
	case code != nil:
	case c.HTTP() == nil:
		code = &CodeError{Code: "HTTP-request-denied"}
	case q.body != nil && q.body.early.closed && !q.body.finished:
		code = &CodeError{Code: "HTTP-request-body-size"}
	case !c.Hold(size):
		code = &CodeError{Code: "connection-limit-reached"}
	}
	if code != nil {
		failedWithCode(c, code)
		return nil
	}
	x := start(c, request, q.body, t, size)
	c.OK()
	c.Own(&futureIncomingResponse{call: x})
	return nil
}

// timeouts returns the timeouts of the options.
func (o *requestOptions) timeouts() timeouts {
	get := func(name string) time.Duration {
		r := wit.NewReader(o.get(name))
		if !r.Option() {
			return defaultTimeout
		}
		return time.Duration(min(r.U64(), uint64(maxTimeout)))
	}
	return timeouts{get("connect-timeout"), get("first-byte-timeout"), get("between-bytes-timeout")}
}

// maxTimeout bounds the timeouts that guests set.
const maxTimeout = 24 * time.Hour

// build makes the http.Request, without a body. It returns an error-code if the guest has set something that cannot be
// sent.
func (q *outgoingRequest) build() (*http.Request, *CodeError) {
	invalid := func(code string) (*http.Request, *CodeError) { return nil, &CodeError{Code: code} }
	method := q.method()
	if !httpguts.ValidHeaderFieldName(method) || method == http.MethodConnect {
		return invalid("HTTP-request-method-invalid")
	}
	target := url.URL{Scheme: q.scheme(), Host: q.text("authority")}
	if target.Scheme != "http" && target.Scheme != "https" {
		return invalid("HTTP-protocol-error")
	}
	path := cmp.Or(q.text("path-with-query"), "/")
	if len(path) > maxPath {
		return invalid("HTTP-request-URI-too-long")
	}
	if path[0] == '?' {
		path = "/" + path
	}
	parsed, err := url.ParseRequestURI(path)
	if err != nil || path[0] != '/' || target.Host == "" || strings.ContainsAny(target.Host, "@/?#") ||
		!httpguts.ValidHostHeader(target.Host) {
		return invalid("HTTP-request-URI-invalid")
	}
	if _, err := url.Parse(target.Scheme + "://" + target.Host); err != nil {
		return invalid("HTTP-request-URI-invalid")
	}
	target.Path, target.RawPath, target.RawQuery, target.ForceQuery = parsed.Path, parsed.RawPath, escapeQuery(parsed.RawQuery),
		parsed.ForceQuery
	length, ok := q.headers.contentLength()
	if !ok {
		return invalid("HTTP-protocol-error")
	}
	r := &http.Request{Method: method, URL: &target, Host: target.Host, Header: http.Header{}, ContentLength: length}
	copyTo(q.headers.list, r.Header, "")
	if r.Trailer, ok = announced(r.Header); !ok {
		return invalid("HTTP-protocol-error")
	}
	if len(r.Trailer) > 0 {
		r.ContentLength = -1 // only a body of unknown length can have trailers
	}
	if r.Header["User-Agent"] == nil {
		r.Header["User-Agent"] = []string{""} // keeps net/http from naming itself
	}
	if q.body == nil {
		if r.ContentLength > 0 {
			return invalid("HTTP-request-body-size")
		}
		r.ContentLength = 0
	}
	r.Header.Del("Content-Length") // net/http writes it, and announces r.Trailer
	r.Header.Del("Trailer")
	return r, nil
}

// escapeQuery escapes the bytes that a query cannot contain (RFC 3986, 3.4), and the percent signs that begin no escape.
// net/http escapes paths, but not queries: a space would end the target of a request over HTTP/1.1.
func escapeQuery(query string) string {
	var b strings.Builder
	for i := range len(query) {
		if c := query[i]; isQueryByte(c) || c == '%' && i+2 < len(query) && isHex(query[i+1]) && isHex(query[i+2]) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

func isQueryByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || strings.IndexByte("-._~!$&'()*+,;=:@/?", c) >= 0
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f' }

// maxPath bounds the path and query of a request, in bytes.
const maxPath = 64 << 10

// text returns a property of the type option<string>, or "".
func (q *outgoingRequest) text(name string) string {
	r := wit.NewReader(q.get(name))
	if !r.Option() {
		return ""
	}
	return r.String()
}

func (q *outgoingRequest) method() string {
	r := wit.NewReader(q.get("method"))
	if i := r.Case(len(methods) + 1); i < len(methods) {
		return methods[i]
	}
	return r.String()
}

// scheme returns the scheme, which is https if the guest has set none.
func (q *outgoingRequest) scheme() string {
	r := wit.NewReader(q.get("scheme"))
	if !r.Option() {
		return "https"
	}
	if i := r.Case(3); i < 2 {
		return []string{"http", "https"}[i]
	}
	return strings.ToLower(r.String())
}
