package node_test

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/test/fake"
)

// TestAliases: a pod that requests an alias belongs to the handler, is reported under the alias, and keeps working
// after the alias is removed from the configuration.
func TestAliases(t *testing.T) {
	dir := t.TempDir()
	b := openAliases(t, dir, map[string]string{"runc": "linux", "kata": "vm"})
	for alias, handler := range map[string]string{"runc": "linux", "kata": "vm"} {
		p, err := b.Pod(b.run(t, alias, podConfig(alias)))
		if err != nil || p.Handler != handler || p.RuntimeHandler() != alias {
			t.Errorf("alias %s: got handler %q and RuntimeHandler %q, %v; want %q and the alias", alias, p.Handler, p.RuntimeHandler(), err, handler)
		}
		if again := b.run(t, alias, podConfig(alias)); again != p.ID {
			t.Errorf("RunSandbox(%s) again = %s, want %s", alias, again, p.ID)
		}
	}
	if p, err := b.Pod(b.run(t, "linux", podConfig("plain"))); err != nil || p.RuntimeHandler() != "linux" {
		t.Errorf("RuntimeHandler without an alias = %q, %v; want linux", p.RuntimeHandler(), err)
	}
	var told []string
	for _, h := range b.Handlers() {
		told = append(told, h.Name+"="+h.AliasOf)
	}
	if got := strings.Join(told, " "); got != "kata=vm linux= runc=linux vm= wasm=" {
		t.Errorf("Handlers() = %s, want the two aliases and three handlers", got)
	}
	b.close()

	b = openAliases(t, dir, nil)
	if _, err := b.RunSandbox(t.Context(), podConfig("other"), "runc"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("RunSandbox with a removed alias: got error %v, want invalid argument", err)
	}
	for _, p := range b.Pods() {
		if name := p.Config.GetMetadata().GetName(); name == "runc" && p.RuntimeHandler() != "runc" {
			t.Errorf("RuntimeHandler after the restart = %q, want runc", p.RuntimeHandler())
		}
		id := b.create(t, p.ID, containerConfig("c"))
		must(t, b.StartContainer(t.Context(), id), b.StopSandbox(t.Context(), p.ID), b.RemoveSandbox(t.Context(), p.ID))
	}
	if left := b.residue(t); len(left) != 0 {
		t.Errorf("residue: got %v, want none", left)
	}
}

// TestInvalidAliases: an alias must refer to a backend and must not have a backend's name.
func TestInvalidAliases(t *testing.T) {
	for _, aliases := range []map[string]string{{"runc": "nowhere"}, {"wasm": "linux"}, {"a": "b", "b": "linux"}} {
		if _, err := openConfig(t.TempDir(),
			func(c *node.Config, _ map[string]*fake.Backend) { c.Aliases = aliases }); !errdefs.IsInvalidArgument(err) {
			t.Errorf("open with the aliases %v: got error %v, want invalid argument", aliases, err)
		}
	}
}

func openAliases(t *testing.T, dir string, aliases map[string]string) *bench {
	t.Helper()
	b, err := openConfig(dir, func(c *node.Config, _ map[string]*fake.Backend) { c.Aliases = aliases })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return b
}
