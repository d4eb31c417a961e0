package h2

import (
	"errors"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	// maxBlock bounds the compressed header of a request, in bytes, and maxContinuations the number of its frames.
	maxBlock         = 256 << 10
	maxContinuations = 2 * maxBlock / maxFrame
	// tableSize bounds the tables of hpack in both directions, in bytes (the default of RFC 7541).
	tableSize = 4096
)

// block is the decoded header or trailer of a request.
type block struct {
	decoder   *hpack.Decoder
	fields    []hpack.HeaderField
	size      int // RFC 9113, 6.5.2
	limit     int
	truncated bool
}

func newBlock(limit int) *block {
	b := &block{limit: limit}
	b.decoder = hpack.NewDecoder(tableSize, b.emit)
	b.decoder.SetMaxStringLength(maxBlock)
	return b
}

func (b *block) emit(f hpack.HeaderField) {
	b.size += int(f.Size())
	if b.size > b.limit {
		b.truncated = true
		b.decoder.SetEmitEnabled(false) // the rest changes only the decoder's table
		return
	}
	b.fields = append(b.fields, f)
}

// readBlock decodes the header block that begins with a frame, and reads its continuations.
func (c *conn) readBlock(f *http2.HeadersFrame) error {
	b := c.block
	clear(b.fields)
	b.fields, b.size, b.truncated = b.fields[:0], 0, false
	b.decoder.SetEmitEnabled(true)
	fragment, ended, total := f.HeaderBlockFragment(), f.HeadersEnded(), 0
	for frames := 0; ; frames++ {
		if total += len(fragment); total > maxBlock || frames > maxContinuations {
			return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
		}
		if _, err := b.decoder.Write(fragment); err != nil {
			return http2.ConnectionError(http2.ErrCodeCompression)
		}
		if ended {
			break
		}
		next, err := c.readFrame()
		if err != nil {
			return err
		}
		more := next.(*http2.ContinuationFrame) // or the framer would have failed
		fragment, ended = more.HeaderBlockFragment(), more.HeadersEnded()
	}
	if b.decoder.Close() != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	return nil
}

// errMalformed means that a request is malformed (RFC 9113, 8.1.1).
var errMalformed = errors.New("malformed request")

// pseudo are the pseudo-header fields of a request (RFC 9113, 8.3.1).
type pseudo struct{ method, scheme, path, authority string }

// set sets a field, which must not be there twice.
func (p *pseudo) set(f hpack.HeaderField) error {
	var to *string
	switch f.Name {
	case ":method":
		to = &p.method
	case ":scheme":
		to = &p.scheme
	case ":path":
		to = &p.path
	case ":authority":
		to = &p.authority
	}
	if to == nil || *to != "" || f.Value == "" && to != &p.authority || !httpguts.ValidHeaderFieldValue(f.Value) {
		return errMalformed
	}
	*to = f.Value
	return nil
}

// check checks which fields are there.
func (p *pseudo) check() error {
	switch {
	case !httpguts.ValidHeaderFieldName(p.method) || !httpguts.ValidHostHeader(p.authority):
		return errMalformed
	case p.method == http.MethodConnect:
		if p.scheme != "" || p.path != "" || p.authority == "" {
			return errMalformed
		}
	case p.scheme != "http" && p.scheme != "https" || p.path == "":
		return errMalformed
	case p.path[0] != '/' && (p.path != "*" || p.method != http.MethodOptions):
		return errMalformed
	}
	return nil
}

// request returns the request of the block, without a body and a context. The error is errMalformed.
func (c *conn) request() (*http.Request, error) {
	var p pseudo
	fields := c.block.fields
	for len(fields) > 0 && strings.HasPrefix(fields[0].Name, ":") {
		if err := p.set(fields[0]); err != nil {
			return nil, err
		}
		fields = fields[1:]
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	header, err := c.header(fields)
	if err != nil {
		return nil, err
	}
	r := &http.Request{
		Method: p.method, Proto: "HTTP/2.0", ProtoMajor: 2, Header: header, Host: p.authority, RequestURI: p.path,
		RemoteAddr: c.peer, TLS: c.tls,
	}
	if hosts := header["Host"]; r.Host == "" && len(hosts) > 0 { // beside :authority, Host has no effect, as gRPC demands (gRFC A41)
		if r.Host = hosts[0]; len(hosts) > 1 || !httpguts.ValidHostHeader(r.Host) {
			return nil, errMalformed
		}
	}
	delete(header, "Host")
	if r.ContentLength, err = contentLength(header["Content-Length"]); err != nil {
		return nil, err
	}
	if p.method == http.MethodConnect {
		r.URL, r.RequestURI = &url.URL{Host: p.authority}, p.authority
		return r, nil
	}
	r.URL, err = parsePath(p.path)
	return r, err
}

// parsePath is a faster url.ParseRequestURI for the paths of gRPC.
func parsePath(path string) (*url.URL, error) {
	for i := range len(path) {
		switch b := path[i]; {
		case b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z', b >= '0' && b <= '9', b == '/', b == '.', b == '_', b == '-':
		default:
			return parseURI(path)
		}
	}
	return &url.URL{Path: path}, nil
}

func parseURI(path string) (*url.URL, error) {
	u, err := url.ParseRequestURI(path)
	if err != nil {
		return nil, errMalformed
	}
	return u, nil
}

// contentLength returns the length that a request declares, or -1.
func contentLength(values []string) (int64, error) {
	if len(values) == 0 {
		return -1, nil
	}
	n, err := strconv.ParseUint(values[0], 10, 63)
	if err != nil {
		return 0, errMalformed
	}
	for _, v := range values[1:] {
		if v != values[0] {
			return 0, errMalformed
		}
	}
	return int64(n), nil
}

// header returns the fields that are not pseudo-header fields, with canonical names.
func (c *conn) header(fields []hpack.HeaderField) (http.Header, error) {
	header := make(http.Header, len(fields))
	values := make([]string, len(fields)) // one allocation for all
	cookies := 0
	for i, f := range fields {
		if err := checkField(f); err != nil {
			return nil, err
		}
		key := canonical(f.Name)
		if had, ok := header[key]; ok {
			if key == "Cookie" {
				cookies++
			}
			header[key] = append(had, f.Value)
			continue
		}
		values[i] = f.Value
		header[key] = values[i : i+1 : i+1]
	}
	if cookies > 0 { // a client can split the field (RFC 9113, 8.2.3)
		header["Cookie"] = []string{strings.Join(header["Cookie"], "; ")}
	}
	return header, nil
}

// checkField checks a field that must not be a pseudo-header field (RFC 9113, 8.2).
func checkField(f hpack.HeaderField) error {
	if !validName(f.Name) || !httpguts.ValidHeaderFieldValue(f.Value) || isConnectionSpecific(f.Name) ||
		f.Name == "te" && f.Value != "trailers" {
		return errMalformed
	}
	return nil
}

func validName(name string) bool {
	for i := range len(name) {
		if b := name[i]; b >= 'A' && b <= 'Z' || !httpguts.IsTokenRune(rune(b)) {
			return false
		}
	}
	return name != ""
}

// known are names that are frequent, in both forms, so that no request has to convert them.
var known = names("Te", "Grpc-Timeout", "Grpc-Encoding", "Grpc-Accept-Encoding", "Grpc-Status", "Grpc-Message", "Grpc-Status-Details-Bin",
	"Grpc-Trace-Bin", "Grpc-Tags-Bin", "Connect-Protocol-Version", "Connect-Timeout-Ms", "Connect-Content-Encoding",
	"Connect-Accept-Encoding", "Traceparent", "Tracestate", "X-Forwarded-For", "X-Request-Id", "X-User-Agent", "Priority",
	"Content-Type", "Content-Length", "Content-Encoding", "Date", "Alt-Svc", "Vary", "Cache-Control", "Etag", "Last-Modified",
	"X-Content-Type-Options", "Accept-Encoding", "User-Agent")

// nameTable has the lower-case form of canonical names, and the reverse.
type nameTable struct{ lower, canonical map[string]string }

func names(list ...string) nameTable {
	t := nameTable{map[string]string{}, map[string]string{}}
	for _, name := range list {
		low := strings.ToLower(name)
		t.lower[name], t.canonical[low] = low, name
	}
	return t
}

// canonical returns the canonical form of a valid name in lower case.
func canonical(name string) string {
	if k, ok := known.canonical[name]; ok {
		return k
	}
	return textproto.CanonicalMIMEHeaderKey(name)
}

// lower returns a name in lower case.
func lower(name string) string {
	if l, ok := known.lower[name]; ok {
		return l
	}
	return strings.ToLower(name)
}
