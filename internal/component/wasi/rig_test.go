package wasi

import (
	"context"
	"slices"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// guest calls host functions as a guest does, with flat values both ways, which are held against the types.
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

// call calls a function by interface and name without version; params are bytes that wit.Append made.
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
	i := slices.IndexFunc(bound, func(b Bound) bool { return b.Interface == iface+"@0.2.12" && b.Name == name })
	if i < 0 {
		g.t.Fatalf("no function %s#%s", iface, name)
	}
	args := slices.Concat(params...)
	check := wit.NewReader(args)
	for _, p := range bound[i].Params {
		check.Check(p)
	}
	if check.Err() != nil || len(check.Rest()) > 0 {
		g.t.Fatalf("%s is called with other parameters: %v, %d bytes left", name, check.Err(), len(check.Rest()))
	}
	out, err := bound[i].Invoke(g.ctx, g.State, args, nil)
	if err != nil {
		return nil, err
	}
	out = slices.Clone(out)
	if r := wit.NewReader(out); bound[i].Result != nil {
		if r.Check(bound[i].Result); r.Err() != nil || len(r.Rest()) > 0 {
			g.t.Fatalf("%s gives %x, which is no %v: %v", name, out, bound[i].Result, r.Err())
		}
	} else if len(out) > 0 {
		g.t.Fatalf("%s gives %x instead of nothing", name, out)
	}
	return wit.NewReader(out), nil
}

func u32(v uint32) []byte  { return wit.AppendU32(nil, v) }
func u64(v uint64) []byte  { return wit.AppendU64(nil, v) }
func str(s string) []byte  { return wit.AppendString(nil, s) }
func list(v []byte) []byte { return wit.AppendBytes(nil, v) }

// ok reads that a result is good.
func ok(t *testing.T, r *wit.Reader) *wit.Reader {
	t.Helper()
	if r.Case(2) != 0 {
		t.Fatalf("an error: % x", r.Rest())
	}
	return r
}

// failed reads that a result is the error of case i.
func failed(t *testing.T, r *wit.Reader, i int) {
	t.Helper()
	if r.Case(2) != 1 {
		t.Fatalf("no error but % x", r.Rest())
	}
	if got := int(r.U32()); got != i {
		t.Fatalf("error %d, want %d", got, i)
	}
}
