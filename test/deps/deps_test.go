package deps

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/tripod-run/tripod/"

// rule says that the packages in from, except those in except, must not depend on the packages in deny, directly or
// indirectly. Tests are exempt.
type rule struct {
	from   []string
	except []string
	deny   []string
	why    string
	// direct means that the rule is about imports, and not about what these depend on.
	direct bool
}

// engine lists the packages that contain the engine. tripod-wasm may depend on them, the daemon must not.
var engine = []string{"internal/component/engine", "internal/component/wasihttp", "internal/sandbox/wasm/internal/grpcclient",
	"internal/sandbox/wasm/internal/worker", "internal/sandbox/wasm/program"}

// workers lists the packages that run in the workers of components, in addition to the engine.
var workers = []string{
	"cmd/tripod-wasm", "internal/sandbox/wasm/program", "internal/sandbox/wasm/internal/dataplane",
	"internal/sandbox/wasm/internal/grpcclient", "internal/sandbox/wasm/internal/lockdown",
	"internal/sandbox/wasm/internal/worker", "internal/sandbox/wasm/internal/workerapi",
}

// tests lists what the tests of a backend's packages share.
var tests = []string{"internal/sandbox/vm/internal/test", "internal/sandbox/wasm/internal/test"}

var backends = []string{"internal/sandbox/linux", "test/fake", "internal/sandbox/vm", "internal/sandbox/wasm"}

var rules = []rule{
	{from: []string{"internal/cri", "internal/edge"}, deny: backends, why: "a control plane knows no backend"},
	{from: []string{"internal/node"}, deny: append([]string{"internal/cri", "internal/edge"}, backends...),
		why: "the node is below the control planes and knows the contract only"},
	{from: []string{"internal", "test"}, deny: []string{"internal/edge$"}, why: "only the daemon opens the MQTT front door"},
	{from: []string{"internal/node/store"}, deny: []string{"internal/sandbox", "internal/network", "internal/image"},
		why: "the store does not know what a record means"},
	{from: backends, except: append(tests, workers...), deny: []string{"internal/cri", "internal/edge", "internal/node"},
		why: "a backend is below the node"},
	{from: []string{"internal/sandbox/ledger", "internal/sandbox/fields"},
		deny: append([]string{"internal/cri", "internal/edge", "internal/node"}, backends...),
		why:  "shared code of the kinds knows none of them"},
	{from: []string{"internal/network", "internal/image", "internal/stats"},
		deny: []string{"internal/cri", "internal/edge", "internal/node", "internal/sandbox"}, why: "a shared service knows nothing of its users"},
	{from: []string{"internal/cgroup"}, deny: []string{"internal/stats", "internal/sandbox", "internal/node"},
		why: "it creates and limits cgroups; other packages read their usage"},
	{from: []string{"internal/stream"}, deny: append([]string{"internal/cri", "internal/edge", "internal/node"}, backends...),
		why: "a shared service knows at most the contract"},
	{from: []string{"cmd", "internal"}, except: tests, deny: append([]string{"test"}, tests...),
		why: "the product does not contain its tests"},
	{from: []string{"test"}, except: []string{"test/fake", "test/sandboxtest", "test/edgetest"},
		deny: append([]string{"internal", "cmd"}, backends...), why: "these tests know the daemon as a user does"},
	{from: []string{"internal/cri", "internal/edge", "internal/node"}, deny: []string{"internal/metrics"},
		why: "the metrics are collected from them"},
	{from: workers, deny: []string{"internal/cri", "internal/edge", "internal/node", "internal/image", "internal/network$",
		"internal/network/builtin", "internal/config", "internal/sandbox$", "internal/sandbox/wasm$"},
		why: "the daemon sends the worker and the dialer all that they need"},
	{from: []string{"internal/channel"}, deny: []string{"internal/cri", "internal/edge", "internal/node", "internal/sandbox"},
		why: "channels know neither a front door nor a kind"},
	// encoding/json, fmt and net would double the size of the guest's program.
	{from: []string{guestAgent, guestProtocol, "cmd/tripod-agent", guestInit, "cmd/tripod-init"},
		deny: []string{"!encoding/json", "!fmt", "!vendor/golang.org/x/net"}, why: "the guest's program is small and starts fast"},
	{from: []string{"internal/sandbox/vm/oci/internal"},
		deny: []string{"internal/sandbox/vm$", "internal/sandbox/vm/templates", vmInternal + "agent$"},
		why:  "a guest is reached by what the caller passes"},
	{from: []string{"internal/sandbox/vm/internal"}, except: tests,
		deny: []string{"internal/sandbox/vm$", "internal/sandbox/vm/oci", "internal/sandbox/vm/templates"},
		why:  "the parts of machines know no backend"},
	{from: vmValues, deny: []string{"internal/image$", vmInternal + "qemu", vmInternal + "libvirt", vmInternal + "qmp", vmInternal + "agent",
		vmInternal + "console"}, why: "what a machine gets is decided before one runs, and without its driver and guest"},
	{from: []string{"internal/sandbox/vm/templates"},
		deny: []string{"internal/image", vmInternal + "qemu", vmInternal + "libvirt", vmInternal + "agent", vmInternal + "guestapi"},
		why:  "templates know machines by an interface, whatever runs in them"},
	{from: []string{"internal/sandbox/vm/oci"}, direct: true,
		deny: []string{vmInternal + "libvirt", vmInternal + "qmp", vmInternal + "confine", vmInternal + "console", vmInternal + "cloudinit",
			vmInternal + "rootdisk", vmInternal + "boot"}, why: "how a machine is made is the business of package vm"},
	{from: []string{"internal/sandbox/vm/guestagent", "internal/sandbox/vm/guestinit", "internal/sandbox/vm/guestnode"},
		deny: []string{"internal/sandbox/vm$", "internal/sandbox/vm/oci", "internal/sandbox/vm/templates", vmInternal + "machine"},
		why:  "it runs in the guest"},
	{from: []string{linuxOCI}, deny: []string{"internal/node", "internal/image", "internal/network", "internal/nri"},
		why: "it runs containers from specifications, whoever has made them"},
	{from: []string{"internal/metrics"}, deny: append([]string{"internal/cri", "internal/edge"}, backends...),
		why: "a service of the node knows no backend"},
	{from: []string{"cmd", "internal", "test"}, except: append([]string{"cmd/tripod-wasm"}, engine...), deny: engine,
		why: "guests never run in the daemon, and the daemon is pure Go"},
	// These packages could get into the programs unnoticed.
	{from: []string{"cmd"}, deny: []string{"!testing", "!github.com/google/go-containerregistry", "!github.com/stretchr/testify"},
		why: "it is for tests"},
	{from: []string{"internal"}, except: append(tests, "internal/cli"), deny: []string{"!k8s.io/client-go"},
		why: "only the command line is a client"},
}

// vmValues lists the packages that decide what a machine gets.
var vmValues = []string{vmInternal + "blockdev", vmInternal + "hotplug", vmInternal + "resources", vmInternal + "validate",
	vmInternal + "volumes"}

// standalone maps a package to the only other packages of the module that it and its subpackages may depend on.
var standalone = map[string][]string{
	"internal/component": {"sdk/wit"}, // a library that other projects could use
	"internal/play":      nil,         // manifests in, messages out
	guestProtocol:        nil,
	guestAgent:           {guestProtocol, guestIdentity}, // copied into guests
	guestIdentity:        nil,
	guestInit:            nil,
}

const (
	guestAgent    = "internal/sandbox/vm/guestagent"
	guestProtocol = "internal/sandbox/vm/internal/agent/wire"
	guestIdentity = "internal/sandbox/vm/internal/identity"
	guestInit     = "internal/sandbox/vm/guestinit"
	vmInternal    = "internal/sandbox/vm/internal/"
	linuxOCI      = "internal/sandbox/linux/internal/oci"
)

// pkg is a package as go list describes it.
type pkg struct {
	ImportPath, Name, Doc string
	Standard              bool
	Imports, Deps         []string
	CgoFiles              []string
}

// below reports whether path is one of the prefixes or below one. A prefix is in this module unless it begins with "!".
// A prefix that ends with "$" matches only that package.
func below(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool {
		if rest, other := strings.CutPrefix(p, "!"); other {
			p = rest
		} else {
			p = module + p
		}
		if alone, ok := strings.CutSuffix(p, "$"); ok {
			return path == alone
		}
		return path == p || strings.HasPrefix(path, p+"/")
	})
}

// check returns the packages in deps on which the package path must not depend.
func (r rule) check(path string, deps []string) []string {
	if !below(path, r.from) || below(path, r.except) {
		return nil
	}
	var bad []string
	for _, d := range deps {
		if below(d, r.deny) {
			bad = append(bad, d)
		}
	}
	return bad
}

// list returns the packages of the module and all packages on which they depend. It needs cgo, because go list
// otherwise ignores the engine's files.
var list = sync.OnceValues(func() (map[string]*pkg, error) {
	c := exec.Command("go", "list", "-e", "-deps", "-json=ImportPath,Name,Doc,Standard,Imports,Deps,CgoFiles", "../../...")
	c.Env = append(c.Environ(), "CGO_ENABLED=1")
	out, err := c.Output()
	if err != nil {
		return nil, err
	}
	found := map[string]*pkg{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return found, nil
		} else if err != nil {
			return nil, err
		}
		found[p.ImportPath] = &p
	}
})

// ours calls f for each package of the module.
func ours(t *testing.T, f func(p *pkg, all map[string]*pkg)) {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for path, p := range all {
		if strings.HasPrefix(path, module) {
			n++
			f(p, all)
		}
	}
	if n < 10 {
		t.Fatalf("packages of the module in go list: got %d, want at least 10", n)
	}
}

func TestImportRules(t *testing.T) {
	ours(t, func(p *pkg, all map[string]*pkg) {
		for _, r := range rules {
			deps := p.Deps
			if r.direct {
				deps = p.Imports
			}
			if bad := r.check(p.ImportPath, deps); bad != nil {
				t.Errorf("%s must not depend on %s (the first of %d): %s\n\t%s", p.ImportPath, bad[0], len(bad), r.why,
					strings.Join(chain(all, p.ImportPath, bad[0]), "\n\t→ "))
			}
		}
	})
}

func TestBackendsDoNotImportEachOther(t *testing.T) {
	ours(t, func(p *pkg, _ map[string]*pkg) {
		for _, own := range backends {
			if !below(p.ImportPath, []string{own}) || below(p.ImportPath, tests) {
				continue
			}
			others := slices.DeleteFunc(slices.Clone(backends), func(b string) bool { return b == own })
			for _, d := range p.Deps {
				if below(d, others) {
					t.Errorf("%s depends on %s: backends never import each other", p.ImportPath, d)
				}
			}
		}
	})
}

// TestTheDaemonOnlyWires limits the packages that cmd/tripod imports, because it only wires the parts together. It
// opens each kind of pod and each front door through one package.
func TestTheDaemonOnlyWires(t *testing.T) {
	const most = 23
	ours(t, func(p *pkg, _ map[string]*pkg) {
		if p.ImportPath != module+"cmd/tripod" {
			return
		}
		n := 0
		for _, d := range p.Imports {
			if strings.HasPrefix(d, module) {
				n++
			}
			if strings.HasPrefix(d, module+"internal/edge/") {
				t.Errorf("cmd/tripod imports %s, want only the door internal/edge", d)
			}
		}
		if n == 0 || n > most {
			t.Errorf("cmd/tripod imports %d packages of this module, want 1 to %d", n, most)
		}
	})
}

// TestOnlyValuesOfTheContract: the package that runs Linux containers uses values of the contract, such as a terminal's size, but
// none of its interfaces.
func TestOnlyValuesOfTheContract(t *testing.T) {
	interfaces := map[string]bool{}
	inspect(t, "internal/sandbox", func(n ast.Node) {
		if spec, ok := n.(*ast.TypeSpec); ok {
			if _, ok := spec.Type.(*ast.InterfaceType); ok {
				interfaces[spec.Name.Name] = true
			}
		}
	})
	if !interfaces["Backend"] {
		t.Fatal("found no interface Backend in the contract")
	}
	uses := 0
	inspect(t, linuxOCI, func(n ast.Node) {
		selected, ok := n.(*ast.SelectorExpr)
		if !ok {
			return
		}
		if pkg, ok := selected.X.(*ast.Ident); ok && pkg.Name == "sandbox" {
			if uses++; interfaces[selected.Sel.Name] {
				t.Errorf("%s uses sandbox.%s, want only values of the contract", linuxOCI, selected.Sel.Name)
			}
		}
	})
	if uses == 0 {
		t.Errorf("%s uses nothing of the contract; remove this test", linuxOCI)
	}
}

// inspect calls f for each node of a package without its tests.
func inspect(t *testing.T, dir string, f func(ast.Node)) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			f(n)
			return true
		})
	}
}

// TestOnlyTheEngineIsC: only the engine uses cgo, so that all other packages build anywhere, without a C compiler.
func TestOnlyTheEngineIsC(t *testing.T) {
	ours(t, func(p *pkg, _ map[string]*pkg) {
		if len(p.CgoFiles) > 0 && !below(p.ImportPath, []string{"internal/component/engine"}) {
			t.Errorf("%s uses cgo in %v, which only the engine may", p.ImportPath, p.CgoFiles)
		}
	})
}

func TestStandalonePackages(t *testing.T) {
	for own, allowed := range standalone {
		n := 0
		ours(t, func(p *pkg, _ map[string]*pkg) {
			if !below(p.ImportPath, []string{own}) {
				return
			}
			n++
			for _, d := range p.Deps {
				if strings.HasPrefix(d, module) && !below(d, append([]string{own}, allowed...)) {
					t.Errorf("%s depends on %s, want no package of the module outside %s and %v", p.ImportPath, d, own, allowed)
				}
			}
		})
		if n == 0 {
			t.Errorf("found no package below %s", own)
		}
	}
}

// TestEveryPackageIsExplained: each package has a package comment.
func TestEveryPackageIsExplained(t *testing.T) {
	ours(t, func(p *pkg, _ map[string]*pkg) {
		if p.Doc == "" && p.Name != "" {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	})
}

// chain returns a path in the import graph from one package to another.
func chain(all map[string]*pkg, from, to string) []string {
	if from == to {
		return []string{to}
	}
	for _, next := range all[from].Imports {
		if next == to || all[next] != nil && slices.Contains(all[next].Deps, to) {
			return append([]string{from}, chain(all, next, to)...)
		}
	}
	return []string{from, to}
}

func TestRulesCatchWhatTheyForbid(t *testing.T) {
	caught := func(from, on string) bool {
		return slices.ContainsFunc(rules, func(r rule) bool { return r.check(from, []string{on}) != nil })
	}
	for _, c := range []struct{ from, on string }{
		{module + "internal/cri", module + "internal/sandbox/linux/internal/spec"},
		{module + "internal/node", module + "internal/cri"},
		{module + "internal/sandbox/linux", module + "internal/node/store"},
		{module + "internal/network", module + "internal/sandbox"},
		{module + "cmd/tripod", "testing"},
		{module + "test/harness", module + "internal/config"},
		{module + "internal/sandbox/wasm", module + "internal/component/engine"},
		{module + "internal/sandbox/wasm/internal/worker", module + "internal/node"},
		{module + "internal/sandbox/wasm/internal/worker", module + "internal/edge/wire"},
		{module + "internal/sandbox/wasm/internal/worker", module + "internal/sandbox"},
		{module + "internal/sandbox/wasm", module + "internal/sandbox/wasm/program"},
		{module + "internal/channel", module + "internal/edge/wire"},
		{module + "internal/cri", module + "internal/sandbox/wasm/artifact"},
		{module + "internal/node", module + "internal/sandbox/vm"},
		{module + "internal/edge/manager", module + "internal/edge"},
		{module + "internal/edge", module + "internal/sandbox/wasm"},
		{module + "internal/sandbox/vm/internal/qemu", module + "internal/node"},
		{module + "internal/network", module + "internal/sandbox/vm/internal/tap"},
		{module + "internal/sandbox/vm/internal/qemu", module + "internal/sandbox/vm/internal/test/machinetest"},
		{module + "internal/sandbox/vm/internal/volumes", module + "internal/sandbox/vm"},
		{module + "internal/sandbox/vm/templates", module + "internal/sandbox/vm/internal/guestapi"},
		{module + "internal/sandbox/vm/guestnode", module + "internal/sandbox/vm/oci"},
		{module + linuxOCI, module + "internal/image"},
	} {
		if !caught(c.from, c.on) {
			t.Errorf("no rule forbids %s to depend on %s", c.from, c.on)
		}
	}
	for _, c := range []struct{ from, on string }{
		{module + "internal/cri", module + "internal/sandbox"},
		{module + "internal/critical", module + "internal/sandbox/linux"},
		{module + "cmd/tripod", module + "internal/sandbox/linux"},
		{module + "test/sandboxtest", module + "internal/cri"},
		{module + "cmd/tripod", module + "internal/edge"},
		{module + "internal/edge", module + "internal/edge/manager"},
		{module + "internal/cli", module + "internal/edge/wire"},
		{module + "internal/sandbox/wasm", module + "internal/sandbox/wasm/internal/workerapi"},
		{module + "cmd/tripod-wasm", module + "internal/component/engine"},
		{module + "internal/sandbox/wasm/internal/worker", module + "internal/component/wasihttp"},
		{module + "internal/sandbox/wasm/internal/worker", module + "internal/sandbox/wasm/internal/workerapi"},
		{module + "internal/sandbox/wasm/internal/worker", module + "internal/channel"},
		{module + "internal/cli", module + "internal/sandbox/wasm/artifact"},
	} {
		if caught(c.from, c.on) {
			t.Errorf("a rule forbids %s to depend on %s", c.from, c.on)
		}
	}
}
