package engine

import (
	"bytes"
	"testing"

	"github.com/containerd/errdefs"
)

// quickly compiles a guest without optimisation.
func quickly(t *testing.T, wasm []byte, opts CompileOptions) []byte {
	t.Helper()
	e, err := New(Config{Quick: true})
	if err != nil {
		t.Fatal(err)
	}
	image, err := e.Compile(t.Context(), wasm, opts)
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// TestReplace: new instances run the optimised code of a guest that was loaded with quick code, while an instance that is there
// goes on. A snapshot of the one serves the other.
func TestReplace(t *testing.T) {
	var prepare bin
	prepare.i32(32).i32(6).u8(0x36, 2, 0)   // [32] = 6
	prepare.i32(9).u8(0x24, 1).zeroResult() // g1 = 9
	wasm, opts := snapshotModule(prepare), snapshotOptions()
	quick := quickly(t, wasm, opts)
	e, err := New(Config{Instances: 10})
	if err != nil {
		t.Fatal(err)
	}
	image, err := e.Compile(t.Context(), wasm, opts)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(image, quick) {
		t.Fatal("quick code is that of the optimising compiler")
	}
	c, err := e.Load(quick, opts.ModuleHost)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	prepared, err := c.Func(PrepareSignature())
	if err != nil {
		t.Fatal(err)
	}
	first := instance(t, c, InstanceOptions{Capture: true})
	if _, err := first.Call(t.Context(), prepared, nil, nil); err != nil {
		t.Fatal(err)
	}
	s, err := first.Capture(0, false, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	handled(t, c, first, 1, 10*1000+7)
	old := first.link
	if err := c.Replace(image); err != nil {
		t.Fatal(err)
	}
	next := instance(t, c, InstanceOptions{Snapshot: s})
	if next.Outdated() || !first.Outdated() {
		t.Error("a new instance runs the old code, or the old instance the new one")
	}
	handled(t, c, next, 2, 11*1000+8)  // from the snapshot
	handled(t, c, first, 1, 11*1000+8) // goes on
	handled(t, c, instance(t, c, InstanceOptions{}), 2, 9*1000+7)
	first.Close()
	if !old.replaced.Load() || old.users != 0 || old.frees != nil {
		t.Errorf("the old code: got %d instances, want none, and that it is freed", old.users)
	}
	if err := c.Replace(quick); err != nil { // any code of the guest
		t.Error(err)
	}
}

// TestReplaceParts: the code of a component of several modules is replaced as often as wanted, and what the old code needed goes.
func TestReplaceParts(t *testing.T) {
	wasm := read(t, "order.wasm")
	e := testEngine(t)
	image, err := e.Compile(t.Context(), wasm, CompileOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.Load(quickly(t, wasm, CompileOptions{}), Host{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.img.Plan == nil {
		t.Fatalf("the guest is not planned: %s", c.WhyComponent())
	}
	want := callParts(t, c, 0)
	for range 3 {
		owned := len(c.frees)
		if err := c.Replace(image); err != nil {
			t.Fatal(err)
		}
		if len(c.frees) != owned {
			t.Errorf("the guest owns %d things of its links", len(c.frees)-owned)
		}
		if got := callParts(t, c, 0); got != want {
			t.Errorf("after Replace: %s, want %s", got, want)
		}
	}
}

// TestReplaceRefused: code of another guest, or damaged code, changes nothing, nor can closed code be replaced.
func TestReplaceRefused(t *testing.T) {
	var one, other bin
	one.zeroResult()
	other.i32(3).u8(0x40, 0, 0x1a).zeroResult()
	e, opts := testEngine(t), snapshotOptions()
	c := loaded(t, e, snapshotModule(one))
	image, err := e.Compile(t.Context(), snapshotModule(one), opts)
	if err != nil {
		t.Fatal(err)
	}
	damaged := bytes.Clone(image)
	damaged[len(damaged)-1] ^= 1
	command, err := e.Compile(t.Context(), read(t, "command.wasm"), CompileOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, image := range map[string][]byte{"damaged": damaged, "another guest": command, "empty": nil} {
		before := c.links
		if err := c.Replace(image); !errdefs.IsFailedPrecondition(err) || c.links != before {
			t.Errorf("%s: got %v, want FailedPrecondition and that nothing changes", name, err)
		}
	}
	handled(t, c, instance(t, c, InstanceOptions{}), 2, 9*1000+7)
	c.Close()
	if err := c.Replace(image); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("closed code: got %v, want FailedPrecondition", err)
	}
}
