package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// step is a command of the plan.
type step struct {
	name string
	env  []string
	args []string
	// quiet means that any output is a failure.
	quiet bool
}

// steps returns the commands, the quickest to fail first.
func (p *plan) steps() (steps []step) {
	add := func(name, env string, needed []string, args ...string) {
		if len(needed) > 0 {
			steps = append(steps, step{name: name, env: strings.Fields(env), args: append(args, needed...)})
		}
	}
	add("gofmt", "", p.format, "gofmt", "-l")
	if len(steps) > 0 {
		steps[0].quiet = true
	}
	add("vet", "CGO_ENABLED=1", dirs(p.changed, p.dependents), "go", "vet", "-tags", "failpoints")
	add("lint", "CGO_ENABLED=1", dirs(p.changed), "build/tools/golangci-lint", "run", "--allow-parallel-runners")
	add("rules", "", dirs(p.rules), "go", "test", "-vet=off")
	if len(p.race)+len(p.plain) > 0 {
		add("images", "", []string{"images"}, "make")
	}
	unit := func(name, kind string, names []string, flags ...string) {
		if len(names) > 0 {
			steps = append(steps, step{name: name, args: append([]string{"hack/unit.sh", kind, strings.Join(dirs(names), " ")}, flags...)})
		}
	}
	for _, tests := range []struct {
		kind  string
		names []string
	}{{"changed", p.race}, {"dependents", p.plain}} {
		cached, uncached := split(tests.names)
		unit(tests.kind, tests.kind, cached)
		unit(tests.kind+" that build programs", tests.kind, uncached, "-count=1")
	}
	if p.endToEnd() > 0 {
		add("build", "", []string{"build", "guest"}, "make")
	}
	for _, name := range daemonTests {
		if tests := p.daemon[name]; len(tests) > 0 {
			// The cache of go test does not know the programs: it passes with a broken worker. So it is not used.
			add(name, "", dirs([]string{name}), "go", "test", "-vet=off", "-count=1", "-timeout", "40m", "-run", "^("+strings.Join(tests, "|")+")$")
		}
	}
	return steps
}

// split divides packages into those whose results can come from the cache of go test, and those that build programs.
func split(names []string) (cached, uncached []string) {
	for _, name := range names {
		if programs[name] == nil {
			cached = append(cached, name)
		} else {
			uncached = append(uncached, name)
		}
	}
	return cached, uncached
}

// dirs returns packages as arguments for go.
func dirs(lists ...[]string) (args []string) {
	for _, names := range lists {
		for _, name := range names {
			args = append(args, "./"+name)
		}
	}
	return args
}

// run runs the steps and stops at the first failure.
func (p *plan) run(w io.Writer) error {
	for _, s := range p.steps() {
		start := time.Now()
		fmt.Fprintf(w, "== %s\n", s.name)
		if err := s.run(w); err != nil {
			return fmt.Errorf("%s after %.0f s: %s: %w", s.name, time.Since(start).Seconds(), strings.Join(s.args, " "), err)
		}
		fmt.Fprintf(w, "== %s: %.0f s\n", s.name, time.Since(start).Seconds())
	}
	return nil
}

func (s step) run(w io.Writer) error {
	c := exec.Command(s.args[0], s.args[1:]...)
	c.Env = append(os.Environ(), s.env...)
	out := &counter{w: w}
	c.Stdout, c.Stderr = out, out
	if err := c.Run(); err != nil {
		return err
	}
	if s.quiet && out.bytes > 0 {
		return fmt.Errorf("lists %d bytes of files", out.bytes)
	}
	return nil
}

// counter counts what passes through it.
type counter struct {
	w     io.Writer
	bytes int
}

func (c *counter) Write(p []byte) (int, error) {
	c.bytes += len(p)
	return c.w.Write(p)
}
