package wasi

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// guest calls host functions like a guest, with flat values, and checks these against the types.
type guest struct {
	t *testing.T
	*State
	ctx context.Context
}

func newGuest(t *testing.T, o Options) *guest {
	g := &guest{t: t, State: NewState(o), ctx: t.Context()}
	t.Cleanup(g.Close)
	return g
}

// call calls a function by its interface, which needs a version only if there are several, and its name. params are flat bytes.
func (g *guest) call(iface, name string, params ...[]byte) *wit.Reader {
	g.t.Helper()
	r, err := g.try(iface, name, params...)
	if err != nil {
		g.t.Fatal(err)
	}
	return r
}

func (g *guest) try(iface, name string, params ...[]byte) (*wit.Reader, error) {
	g.t.Helper()
	_, bound := Interfaces()
	i := slices.IndexFunc(bound, func(b Bound) bool {
		known, _, _ := strings.Cut(b.Interface, "@")
		return (b.Interface == iface || known == iface) && b.Name == name
	})
	if i < 0 {
		g.t.Fatalf("function %s#%s does not exist", iface, name)
	}
	args := slices.Concat(params...)
	check := wit.NewReader(args)
	for _, p := range bound[i].Params {
		check.Check(p)
	}
	if check.Err() != nil || len(check.Rest()) > 0 {
		g.t.Fatalf("%s: the test passes wrong parameters: %v, %d bytes left", name, check.Err(), len(check.Rest()))
	}
	out, err := bound[i].Invoke(g.ctx, g.State, args, func() {})
	if err != nil {
		return nil, err
	}
	out = slices.Clone(out)
	if r := wit.NewReader(out); bound[i].Result != nil {
		if r.Check(bound[i].Result); r.Err() != nil || len(r.Rest()) > 0 {
			g.t.Fatalf("%s returned %x, which is not a %v: %v", name, out, bound[i].Result, r.Err())
		}
	} else if len(out) > 0 {
		g.t.Fatalf("%s returned %x, want no result", name, out)
	}
	return wit.NewReader(out), nil
}

func u32(v uint32) []byte  { return wit.AppendU32(nil, v) }
func u64(v uint64) []byte  { return wit.AppendU64(nil, v) }
func str(s string) []byte  { return wit.AppendString(nil, s) }
func list(v []byte) []byte { return wit.AppendBytes(nil, v) }

// ok requires a result to be ok, and returns the reader at its value.
func ok(t *testing.T, r *wit.Reader) *wit.Reader {
	t.Helper()
	if r.Case(2) != 0 {
		t.Fatalf("the result is an error: % x", r.Rest())
	}
	return r
}

// failed requires a result to be the error of case i.
func failed(t *testing.T, r *wit.Reader, i int) {
	t.Helper()
	if r.Case(2) != 1 {
		t.Fatalf("the result is ok (% x), want error %d", r.Rest(), i)
	}
	if got := int(r.U32()); got != i {
		t.Fatalf("the result is error %d, want %d", got, i)
	}
}
