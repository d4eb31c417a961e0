package wasihttp

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

func newGuest(t *testing.T) *guest {
	s := NewSession(wasi.Options{})
	t.Cleanup(s.Close)
	return &guest{t, t.Context(), s}
}

func TestFields(t *testing.T) {
	g := newGuest(t)
	f := g.fields("X-One", "1", "x-two", "2", "x-one", "3")
	get := func(f uint32, name string) (all []string) {
		r := g.call(types, "[method]fields.get", u32(f), str(name))
		for range r.Len() {
			all = append(all, r.String())
		}
		return all
	}
	if got := get(f, "x-ONE"); strings.Join(got, ",") != "1,3" {
		t.Errorf("get(x-ONE) = %v, want 1, 3", got)
	}
	copied := g.call(types, "[method]fields.clone", u32(f)).U32()
	g.ok(g.call(types, "[method]fields.set", u32(f), str("X-ONE"), u32(1), str("4")))
	g.ok(g.call(types, "[method]fields.delete", u32(f), str("x-two")))
	g.ok(g.call(types, "[method]fields.append", u32(f), str("x-three"), str("5")))
	if one, two := get(f, "x-one"), get(f, "x-two"); strings.Join(one, ",") != "4" || two != nil ||
		!g.call(types, "[method]fields.has", u32(f), str("x-three")).Bool() {
		t.Errorf("after the changes x-one = %v, want 4; x-two = %v, want none; x-three must exist", one, two)
	}
	if got := get(copied, "x-one"); len(got) != 2 {
		t.Errorf("get of the copy = %v, want it unchanged", got)
	}
}

func TestFieldsThatAreRefused(t *testing.T) {
	g := newGuest(t)
	f := g.call(types, "[constructor]fields").U32()
	for _, c := range []struct {
		name, value string
		code        uint32
	}{
		{"bad name", "x", invalidSyntax}, {"", "x", invalidSyntax}, {"x", "bad\r\nx-injected: 1", invalidSyntax}, {"x", "nul\x00", invalidSyntax},
		{"Host", "example.com", forbidden}, {"transfer-encoding", "chunked", forbidden}, {"Connection", "close", forbidden},
		{"upgrade", "h2c", forbidden},
		{"x", strings.Repeat("x", maxFields), forbidden},
	} {
		for what, r := range map[string]*wit.Reader{
			"append":    g.call(types, "[method]fields.append", u32(f), str(c.name), str(c.value)),
			"set":       g.call(types, "[method]fields.set", u32(f), str(c.name), u32(1), str(c.value)),
			"from-list": g.call(types, "[static]fields.from-list", u32(1), str(c.name), str(c.value)),
		} {
			if isOK(r) || r.U32() != c.code {
				t.Errorf("%s of %q: %.20q was not refused with error %d", what, c.name, c.value, c.code)
			}
		}
	}
}

// TestTrailersAreExpected: the field te can have the value trailers and no other one, in both directions.
func TestTrailersAreExpected(t *testing.T) {
	g := newGuest(t)
	f := g.fields("te", "trailers")
	g.ok(g.call(types, "[method]fields.set", u32(f), str("TE"), u32(1), str("trailers")))
	for _, v := range []string{"gzip", "trailers, gzip", "trailers;q=1", ""} {
		if r := g.call(types, "[method]fields.append", u32(f), str("te"), str(v)); isOK(r) || r.U32() != forbidden {
			t.Errorf("append of te: %q was not refused", v)
		}
		if r := g.call(types, "[method]fields.set", u32(f), str("te"), u32(2), str("trailers"), str(v)); isOK(r) || r.U32() != forbidden {
			t.Errorf("set of te: trailers and %q was not refused", v)
		}
	}
	g.ok(g.call(types, "[method]fields.delete", u32(f), str("te")))
	got := fieldsOf(http.Header{"Te": {"gzip", "trailers"}, "Connection": {"TE"}, "X": {"1"}})
	if want := []field{{"te", "trailers"}, {"x", "1"}}; !slices.Equal(got, want) {
		t.Errorf("fields of an incoming header = %v, want %v", got, want)
	}
}

// TestNobodyIsAsked: a guest can make requests, and all are denied.
func TestNobodyIsAsked(t *testing.T) {
	g := newGuest(t)
	q := g.call(types, "[constructor]outgoing-request", u32(g.fields())).U32()
	g.ok(g.call(types, "[method]outgoing-request.set-authority", u32(q), some(str("example.com"))))
	if r := g.call(types, "[method]outgoing-request.authority", u32(q)); !r.Option() || r.String() != "example.com" {
		t.Error("authority is not example.com")
	}
	if m := g.call(types, "[method]outgoing-request.method", u32(q)).U32(); m != 0 {
		t.Errorf("method = %d, want 0 (get)", m)
	}
	o := g.call(types, "[constructor]request-options").U32()
	g.ok(g.call(types, "[method]request-options.set-connect-timeout", u32(o), some(u64(1))))
	body := g.ok(g.call(types, "[method]outgoing-request.body", u32(q))).U32()
	g.write(g.stream(body), "body")
	g.finish(body)
	r := g.call("wasi:http/outgoing-handler", "handle", u32(q), some(u32(o)))
	if isOK(r) || r.U32() != uint32(caseOf("HTTP-request-denied")) {
		t.Error("handle did not return HTTP-request-denied")
	}
}

func TestErrorCodesAreComplete(t *testing.T) {
	if n := len(errorCodes().Cases); n != 39 {
		t.Errorf("%d error-codes, want 39", n)
	}
	for name := range statuses {
		if caseOf(name) < 0 {
			t.Errorf("error-code %s does not exist", name)
		}
	}
}
