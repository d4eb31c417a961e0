package wasi

import (
	"strings"
	"testing"
)

func TestParseWIT(t *testing.T) {
	first, err := ParseWIT(`// a comment
package a:b@1.0.0;
interface first {
  variant v { none, some(u8) }
  resource r { constructor(n: u32); get: func() -> option<string>; make: static func(x: v) -> result<r>; }
}`)
	if err != nil {
		t.Fatal(err)
	}
	all, err := ParseWIT(`package a:b@1.0.0;
interface second {
  use a:b/first@1.0.0.{r as other, v};
  f: func(%list: list<tuple<u8, v>>, b: borrow<other>) -> result<_, later>;
  resource later;
  g: func();
}`, first...)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, i := range append(first, all...) {
		for _, f := range i.Funcs {
			text := i.Name + "#" + f.Name + "("
			for _, p := range f.Params {
				text += p.String() + ","
			}
			got = append(got, text+") "+f.Result.String())
		}
	}
	want := []string{
		"a:b/first@1.0.0#[constructor]r(u32,) own<a:b/first@1.0.0#r>",
		"a:b/first@1.0.0#[method]r.get(borrow<a:b/first@1.0.0#r>,) option<string>",
		"a:b/first@1.0.0#[static]r.make(v,) result<own<a:b/first@1.0.0#r>>",
		"a:b/second@1.0.0#f(list<tuple<u8, v>>,borrow<a:b/first@1.0.0#r>,) result<_, own<a:b/second@1.0.0#later>>",
		"a:b/second@1.0.0#g() _",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestParseWITRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"interface x {}":           `found "interface", expected "package"`,
		"package a:b@1.0.0; world": `found "world", expected "interface"`,
		"package a:b@1.0.0; interface i { f: func() -> nothing; }": "no type nothing",
		"package a:b@1.0.0; interface i { use c:d/e@1.0.0.{f}; }":  "c:d/e@1.0.0 is not known",
		"package a:b@1.0.0; interface i { f: func(":                "unexpected end",
	} {
		if _, err := ParseWIT(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseWIT(%q): %v, want %s", text, err, want)
		}
	}
}

// TestEveryFunctionIsImplemented parses the texts of all interfaces and binds their functions.
func TestEveryFunctionIsImplemented(t *testing.T) {
	interfaces, bound := Interfaces()
	if len(interfaces) < 15 || len(bound) < 100 {
		t.Errorf("Interfaces returned %d interfaces, %d functions; want at least 15, 100", len(interfaces), len(bound))
	}
	if _, err := Bind(interfaces[1], map[string]Func{"poll": poll, "nothing": poll}); err == nil ||
		!strings.Contains(err.Error(), "pollable.block has no implementation") {
		t.Errorf("Bind without an implementation: %v", err)
	}
}
