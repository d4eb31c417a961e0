package wasihttp

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// Cases of header-error.
const (
	invalidSyntax = iota
	forbidden
	immutable
)

// maxFields limits the size of one fields resource, in bytes. The size of a field is the length of its name and value
// plus fieldOverhead (RFC 7541, 4.1).
const (
	maxFields     = 1 << 20
	fieldOverhead = 32
)

// fieldCost is the memory of a field in an http.Header, in bytes, besides its name and value: the map's entry, the slice
// of values, and what allocations are rounded up by.
const fieldCost = 128

// headerSize returns the memory of a header, in bytes.
func headerSize(header http.Header) (n int) {
	for name, values := range header {
		n += len(name) + fieldCost*max(len(values), 1)
		for _, v := range values {
			n += len(v)
		}
	}
	return n
}

// listSize returns the memory of a list of fields as an http.Header, in bytes.
func listSize(list []field) (n int) {
	for _, x := range list {
		n += len(x.name) + len(x.value) + fieldCost
	}
	return n
}

// fields is the resource "fields" of wasi:http/types. The names of the fields are in lower case. The fields are in the
// order in which they were added.
type fields struct {
	list      []field
	size      int // counted by State.Hold
	immutable bool
	state     *wasi.State
}

type field struct{ name, value string }

func (x field) size() int { return len(x.name) + len(x.value) + fieldOverhead }

// ownFields gives the guest a fields resource with the given list. The list can be shared with other resources. The
// State counts the size of the list as held.
func ownFields(c *wasi.Call, list []field, immutable bool) error {
	f := &fields{list: list, immutable: immutable, state: c.State}
	for _, x := range list {
		f.size += x.size()
	}
	if !c.Hold(f.size) {
		return wasi.ErrHeld
	}
	c.Own(f)
	return nil
}

// entries returns the list of fields. A nil fields has none.
func (f *fields) entries() []field {
	if f == nil {
		return nil
	}
	return f.list
}

// Close releases the fields. It is called when the guest drops the resource or passes it to the host. A nil fields has
// nothing to release.
func (f *fields) Close() error {
	if f == nil {
		return nil
	}
	f.state.Hold(-f.size)
	f.list, f.size = nil, 0
	return nil
}

// forbiddenNames are the names of the fields that only the server may set. Some of them belong to the connection (RFC
// 9110, 7.6.1).
var forbiddenNames = []string{
	"connection", "host", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
	"transfer-encoding", "upgrade",
}

// isForbidden reports whether only the server may set a field to one of the values. The field te may have the value
// trailers, which gRPC needs and which is the only one in HTTP/2 (RFC 9113, 8.2.2).
func isForbidden(name string, values ...string) bool {
	if name = strings.ToLower(name); name == "te" {
		return slices.ContainsFunc(values, func(v string) bool { return v != "trailers" })
	}
	return slices.Contains(forbiddenNames, name)
}

// fieldsOf returns the fields of an http.Header, except forbidden ones, sorted by name.
func fieldsOf(header http.Header) (list []field) {
	names := make([]string, 0, len(header))
	for name := range header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for _, v := range header[name] {
			if !isForbidden(name, v) {
				list = append(list, field{strings.ToLower(name), v})
			}
		}
	}
	return list
}

// check returns the case of header-error that says why the field cannot be added, or -1 if it can.
func (f *fields) check(name string, values ...string) int {
	switch {
	case f.immutable:
		return immutable
	case !httpguts.ValidHeaderFieldName(name):
		return invalidSyntax
	case isForbidden(name, values...):
		return forbidden
	}
	size := f.size
	for _, v := range values {
		if !httpguts.ValidHeaderFieldValue(v) {
			return invalidSyntax
		}
		size += field{name, v}.size()
	}
	if size > maxFields || !f.state.Hold(size-f.size) {
		return forbidden
	}
	f.state.Hold(f.size - size) // this was only a check; add will hold the size
	return -1
}

func (f *fields) add(name, value string) {
	x := field{strings.ToLower(name), value}
	f.list = append(f.list, x)
	f.state.Hold(x.size())
	f.size += x.size()
}

func (f *fields) remove(name string) {
	name = strings.ToLower(name)
	f.list = slices.DeleteFunc(f.list, func(x field) bool {
		if x.name == name {
			f.state.Hold(-x.size())
			f.size -= x.size()
		}
		return x.name == name
	})
}

func (f *fields) get(name string) []string {
	var values []string
	for _, x := range f.list {
		if strings.EqualFold(x.name, name) {
			values = append(values, x.value)
		}
	}
	return values
}

// copyTo adds fields to an http.Header, without the spaces around values, which HTTP/2 forbids (RFC 9113, 8.2.1). It puts
// the given prefix before each name; the names of trailers need a prefix.
func copyTo(list []field, header http.Header, prefix string) {
	for _, x := range list {
		name := prefix + textproto.CanonicalMIMEHeaderKey(x.name)
		header[name] = append(header[name], textproto.TrimString(x.value))
	}
}

// onFields makes a method of the resource "fields" from the given function.
func onFields(do func(c *wasi.Call, f *fields)) wasi.Func {
	return on(func(c *wasi.Call, f *fields) error {
		do(c, f)
		return nil
	})
}

// changed writes a result<_, header-error>. A refused of 0 or more is a case of header-error, and the result is that
// error. Otherwise changed calls do, and the result is ok.
func changed(c *wasi.Call, refused int, do func()) {
	if refused >= 0 {
		c.FailedWith(refused)
		return
	}
	do()
	c.OK()
}

func appendEntries(c *wasi.Call, list []field) {
	c.Out = wit.AppendLen(c.Out, len(list))
	for _, x := range list {
		c.Out = wit.AppendString(wit.AppendString(c.Out, x.name), x.value)
	}
}

func fieldsFromList(c *wasi.Call) error {
	f := &fields{state: c.State}
	for range c.In.Len() {
		name, v := c.In.String(), c.In.String()
		if refused := f.check(name, v); refused >= 0 {
			c.FailedWith(refused)
			c.In.Raw(len(c.In.Rest()))
			return f.Close()
		}
		f.add(name, v)
	}
	c.OK()
	c.Own(f)
	return nil
}

var fieldsFuncs = map[string]wasi.Func{
	"[constructor]fields":      func(c *wasi.Call) error { return ownFields(c, nil, false) },
	"[static]fields.from-list": fieldsFromList,
	"[method]fields.get": onFields(func(c *wasi.Call, f *fields) {
		values := f.get(c.In.String())
		c.Out = wit.AppendLen(c.Out, len(values))
		for _, v := range values {
			c.Out = wit.AppendString(c.Out, v)
		}
	}),
	"[method]fields.has": onFields(func(c *wasi.Call, f *fields) {
		c.Out = wit.AppendBool(c.Out, len(f.get(c.In.String())) > 0)
	}),
	"[method]fields.set": onFields(func(c *wasi.Call, f *fields) {
		name := c.In.String()
		values := make([]string, c.In.Len())
		for i := range values {
			values[i] = c.In.String()
		}
		changed(c, f.check(name, values...), func() {
			f.remove(name)
			for _, v := range values {
				f.add(name, v)
			}
		})
	}),
	"[method]fields.delete": onFields(func(c *wasi.Call, f *fields) {
		name := c.In.String()
		changed(c, f.check(name), func() { f.remove(name) })
	}),
	"[method]fields.append": onFields(func(c *wasi.Call, f *fields) {
		name, v := c.In.String(), c.In.String()
		changed(c, f.check(name, v), func() { f.add(name, v) })
	}),
	"[method]fields.entries": onFields(func(c *wasi.Call, f *fields) { appendEntries(c, f.list) }),
	"[method]fields.clone": on(func(c *wasi.Call, f *fields) error {
		return ownFields(c, slices.Clone(f.list), false)
	}),
}
