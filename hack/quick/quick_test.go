package main

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// made returns a repository with a made-up import graph:
//
//	cmd/tripod ──► internal/node ──► internal/sandbox ──► internal/crilog
//	    └───► internal/sandbox/vm ────────┘                   ▲
//	                                       internal/stream ···┘ in its tests
//	internal/cli ──► internal/stream, internal/cdi (removed)
func made() *repo {
	p := func(imports ...string) *pkg { return &pkg{imports: imports, hasTests: true} }
	r := &repo{
		packages: map[string]*pkg{
			"cmd/tripod":          p("internal/node", "internal/sandbox/vm"),
			"internal/node":       p("internal/sandbox"),
			"internal/sandbox":    p("internal/crilog"),
			"internal/sandbox/vm": p("internal/sandbox"),
			"internal/crilog":     p(),
			"internal/stream":     {testImports: []string{"internal/crilog"}, hasTests: true},
			"internal/cli":        p("internal/cdi", "internal/stream"),
			"internal/config":     {embeds: []string{"default.toml", "help.md"}},
			"test/e2e":            p(),
			"test/kubelet":        p(),
		},
		unit:    map[string]bool{},
		modules: []string{"sdk/go"},
		tests: map[string]map[string][]string{
			"test/e2e":   {"test/e2e/logs_test.go": {"TestLogs"}, "test/e2e/top_test.go": {"TestTop"}, "test/e2e/pod_test.go": {"TestPodSandbox"}},
			"test/crash": {"test/crash/faults_test.go": {"TestN2InitProcessIsKilled"}},
		},
		tables: tables{
			rooms: []room{
				{dirs: []string{"internal/crilog"}, e2e: "^TestLogs$", dependents: 10},
				{dirs: []string{"internal/sandbox"}, e2e: "^Test(Logs|Pod)", crash: "^TestN2", dependents: 60},
				{dirs: []string{"internal/config"}, e2e: "^TestPodSandbox$", dependents: 10},
				{dirs: []string{"internal/cdi"}},
			},
			heavy: map[string]bool{"internal/sandbox/vm": true},
			costs: map[string]int{"cmd/tripod": 25, "internal/node": 25, "internal/sandbox/vm": 90, "internal/stream": 20},
		},
		exists: func(file string) bool { return file != "internal/crilog/gone.go" && file != "internal/cdi/cdi.go" },
	}
	for name := range r.packages {
		r.unit[name] = !below(name, "test")
	}
	return r
}

func TestDependents(t *testing.T) {
	for of, want := range map[string]map[string]int{
		// The tests of stream import crilog, but cli is not reached by that.
		"internal/crilog":  {"internal/sandbox": 1, "internal/stream": 1, "internal/node": 2, "internal/sandbox/vm": 2, "cmd/tripod": 3},
		"internal/stream":  {"internal/cli": 1},
		"internal/sandbox": {"internal/node": 1, "internal/sandbox/vm": 1, "cmd/tripod": 2},
		"cmd/tripod":       {},
	} {
		if got := made().dependents([]string{of}); !maps.Equal(got, want) {
			t.Errorf("dependents of %s: %v, want %v", of, got, want)
		}
	}
}

func TestPlan(t *testing.T) {
	for _, c := range []struct {
		why   string
		files []string
		want  plan
	}{
		{"a leaf: what its seconds allow, nothing heavy, the tests of logs", []string{"internal/crilog/write.go"}, plan{
			format: []string{"internal/crilog/write.go"}, changed: []string{"internal/crilog"}, rules: rules,
			dependents: []string{"cmd/tripod", "internal/node", "internal/sandbox", "internal/sandbox/vm", "internal/stream"},
			race:       []string{"internal/crilog"}, plain: []string{"internal/sandbox"},
			daemon: map[string][]string{"test/e2e": {"TestLogs"}},
			left: map[string]string{"cmd/tripod": "a dependent of some 25 s", "internal/node": "a dependent of some 25 s",
				"internal/stream": "a dependent of some 20 s", "internal/sandbox/vm": "boots machines"},
		}},
		{"only a test: no dependents, no daemon", []string{"internal/crilog/write_test.go", "internal/crilog/testdata/fuzz/a.go"}, plan{
			format: []string{"internal/crilog/write_test.go"}, changed: []string{"internal/crilog"}, rules: rules, race: []string{"internal/crilog"},
		}},
		{"the contract runs what boots machines", []string{"internal/sandbox/sandbox.go"}, plan{
			format: []string{"internal/sandbox/sandbox.go"}, changed: []string{"internal/sandbox"}, rules: rules, race: []string{"internal/sandbox"},
			dependents: []string{"cmd/tripod", "internal/node", "internal/sandbox/vm"},
			plain:      []string{"cmd/tripod", "internal/node", "internal/sandbox/vm"},
			daemon:     map[string][]string{"test/e2e": {"TestLogs", "TestPodSandbox"}, "test/crash": {"TestN2InitProcessIsKilled"}},
		}},
		{"an embedded file is code, also if it is a document; a removed file is not formatted",
			[]string{"internal/config/help.md", "internal/crilog/gone.go"}, plan{
				changed: []string{"internal/config", "internal/crilog"}, rules: rules, race: []string{"internal/crilog"},
				dependents: []string{"cmd/tripod", "internal/node", "internal/sandbox", "internal/sandbox/vm", "internal/stream"},
				plain:      []string{"internal/sandbox"},
				daemon:     map[string][]string{"test/e2e": {"TestLogs", "TestPodSandbox"}},
				left: map[string]string{"cmd/tripod": "a dependent of some 25 s", "internal/node": "a dependent of some 25 s",
					"internal/stream": "a dependent of some 20 s", "internal/sandbox/vm": "boots machines"},
			}},
		{"a removed package breaks those that import it", []string{"internal/cdi/cdi.go"}, plan{
			removed: []string{"internal/cdi"}, rules: rules, dependents: []string{"internal/cli"},
			left: map[string]string{"internal/cli": "a dependent of some 4 s"},
		}},
		{"documents", []string{"docs/spec.md", "internal/crilog/README.md"}, plan{rules: rules}},
		{"a document that a package's test reads", []string{"docs/states.md"},
			plan{changed: []string{"internal/node"}, rules: rules, race: []string{"internal/node"}}},
		{"a test with a daemon runs itself", []string{"test/e2e/top_test.go"}, plan{
			format: []string{"test/e2e/top_test.go"}, changed: []string{"test/e2e"}, rules: rules,
			daemon: map[string][]string{"test/e2e": {"TestTop"}},
		}},
		{"what quick cannot run is said", []string{"sdk/go/server.go", "test/kubelet/job_test.go", "Makefile"}, plan{
			format: []string{"test/kubelet/job_test.go"}, changed: []string{"test/kubelet"}, rules: rules,
			left: map[string]string{"sdk/go": "another module: make lint, make test-unit", "test/kubelet": "has its own target in the Makefile",
				"Makefile": "belongs to no package"},
		}},
		{"nothing", nil, plan{}},
	} {
		slices.Sort(c.files)
		c.want.files = c.files
		if c.want.left == nil {
			c.want.left = map[string]string{}
		}
		if c.want.daemon == nil {
			c.want.daemon = map[string][]string{}
		}
		if got := made().plan(c.files); !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", c.why, *got, c.want)
		}
	}
}

// TestPlanOfDependency tests that a changed dependency reaches every package, but no slow test.
func TestPlanOfDependency(t *testing.T) {
	p := made().plan([]string{"go.sum"})
	if len(p.changed) != len(made().packages) || slices.Contains(p.plain, "internal/sandbox/vm") ||
		slices.Contains(p.plain, "internal/node") || !slices.Contains(p.plain, "internal/crilog") {
		t.Errorf("%+v", p)
	}
}

// TestRooms tests that the table fits the repository: a pattern that matches nothing would test nothing.
func TestRooms(t *testing.T) {
	t.Chdir("../..")
	r, err := read([]string{"./cmd/...", "./internal/...", "./test/sandboxtest/..."})
	if err != nil {
		t.Fatal(err)
	}
	check := func(name, pattern string) {
		expr := regexp.MustCompile(pattern)
		for _, alternative := range alternatives(pattern) {
			if len(r.matching(name, alternative)) == 0 {
				t.Errorf("%s: %s in %s matches no test", name, alternative, expr)
			}
		}
	}
	check("test/e2e", core)
	seen := map[string]bool{}
	for _, room := range rooms {
		for _, dir := range room.dirs {
			if seen[dir] {
				t.Errorf("%s has two rooms", dir)
			}
			seen[dir] = true
			if !r.exists(dir) {
				t.Errorf("the room %s is not in the repository", dir)
			}
		}
		check("test/e2e", room.e2e)
		check("test/crash", room.crash)
	}
	internal, err := filepath.Glob("internal/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range internal {
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			continue
		}
		if seen[dir] == slices.Contains(roomless, dir) {
			t.Errorf("%s: want a room, or a line in roomless, and not both", dir)
		}
	}
	for name := range costs {
		if r.packages[name] == nil || !r.unit[name] {
			t.Errorf("costs has %s, which is no package with unit tests", name)
		}
	}
	for name := range heavy {
		if r.packages[name] == nil || r.cost(name) == usual {
			t.Errorf("heavy has %s, which is no package or has no cost", name)
		}
	}
	for file, names := range documents {
		if !r.exists(file) {
			t.Errorf("%s is missing", file)
		}
		for _, name := range names {
			if r.packages[name] == nil {
				t.Errorf("the readers of %s: %s is missing", file, name)
			}
		}
	}
	for _, name := range slices.Concat(rules, daemonTests, roomless) {
		if r.packages[name] == nil {
			t.Errorf("%s is missing", name)
		}
	}
}

// TestPrograms tests that the table has each of our programs that a unit test builds.
func TestPrograms(t *testing.T) {
	t.Chdir("../..")
	built := regexp.MustCompile(`"(?:[^"\n]* )?` + module + `(cmd/[a-z-]+)"\)`)
	found := map[string][]string{}
	err := filepath.WalkDir("internal", func(file string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		for _, m := range built.FindAllSubmatch(text, -1) {
			found[filepath.Dir(file)] = append(found[filepath.Dir(file)], string(m[1]))
		}
		return err
	})
	if err != nil || !maps.EqualFunc(found, programs, slices.Equal[[]string]) {
		t.Errorf("%v, want %v, %v", programs, found, err)
	}
}

// TestSteps tests that the quickest steps come first and that only results that do not depend on programs are cached.
func TestSteps(t *testing.T) {
	p := &plan{
		format: []string{"a.go"}, changed: []string{"internal/cli"}, dependents: []string{"internal/cri"}, rules: rules,
		race:  []string{"internal/cli"},
		plain: []string{"internal/cri", "internal/edge/runtime/unitpods"}, daemon: map[string][]string{"test/e2e": {"TestLogs", "TestTop"}},
	}
	want := []string{
		"gofmt -l a.go",
		"go vet -tags failpoints ./internal/cli ./internal/cri",
		"build/tools/golangci-lint run --allow-parallel-runners ./internal/cli",
		"go test -vet=off ./hack/observe ./test/deps ./test/prose",
		"make images",
		"hack/unit.sh changed ./internal/cli",
		"hack/unit.sh dependents ./internal/cri",
		"hack/unit.sh dependents ./internal/edge/runtime/unitpods -count=1",
		"make build guest",
		"go test -vet=off -count=1 -timeout 40m -run ^(TestLogs|TestTop)$ ./test/e2e",
	}
	var got []string
	for _, s := range p.steps() {
		got = append(got, strings.Join(s.args, " "))
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if steps := (&plan{}).steps(); len(steps) > 0 {
		t.Errorf("without a change: %v", steps)
	}
}

var group = regexp.MustCompile(`^\^Test\(([^()]+)\)(\$?)$`)

// alternatives returns the patterns that a pattern of the table consists of, so that each of its names is tested.
func alternatives(pattern string) (all []string) {
	if pattern == "" {
		return nil
	}
	for _, part := range regexp.MustCompile(`\|\^`).Split(pattern, -1) {
		if part[0] != '^' {
			part = "^" + part
		}
		found := group.FindStringSubmatch(part)
		if found == nil {
			all = append(all, part)
			continue
		}
		for _, name := range regexp.MustCompile(`\|`).Split(found[1], -1) {
			all = append(all, "^Test"+name+found[2])
		}
	}
	return all
}
