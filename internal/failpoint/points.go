//go:build failpoints

package failpoint

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

var (
	mu    sync.Mutex
	known = map[string]*Point{}
	// armedAtStart returns the actions in the environment variable, by point name.
	armedAtStart = sync.OnceValues(func() (map[string]*action, error) { return parse(os.Getenv(Variable)) })
)

// Point is a fail point.
type Point struct {
	name   string
	action atomic.Pointer[action]
}

// New makes a point with the given name, which has the form "package.operation.line". It panics if the name is taken.
func New(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if known[name] != nil {
		panic("failpoint: two points named " + name)
	}
	p := &Point{name: name}
	known[name] = p
	if actions, err := armedAtStart(); err == nil {
		p.action.Store(actions[name])
	}
	return p
}

// Names returns the names of all points of the program, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	names := make([]string, 0, len(known))
	for name := range known {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Check returns an error if the environment variable has bad syntax or unknown names.
func Check() error {
	actions, err := armedAtStart()
	if err != nil {
		return err
	}
	names := Names()
	for name := range actions {
		if _, ok := slices.BinarySearch(names, name); !ok {
			return fmt.Errorf("%s contains %q, which is not a fail point", Variable, name)
		}
	}
	return nil
}

// Arm sets the action of a point, in the syntax of the environment variable; "" disarms the point. Arm is for tests
// that run in this process.
func Arm(name, spec string) error {
	mu.Lock()
	p := known[name]
	mu.Unlock()
	if p == nil {
		return fmt.Errorf("no fail point %q", name)
	}
	if spec == "" {
		p.action.Store(nil)
		return nil
	}
	a, err := parseAction(spec)
	if err != nil {
		return err
	}
	p.action.Store(a)
	return nil
}

// Needed skips a test if the build has no fail points. This build has them, so Needed does nothing.
func Needed(skipper) {}

// Hit performs the point's action, if the point is armed.
func (p *Point) Hit(ctx context.Context) error {
	a := p.action.Load()
	if a == nil {
		return nil
	}
	return a.do(ctx, p.name)
}

func parse(spec string) (map[string]*action, error) {
	actions := map[string]*action{}
	for entry := range strings.SplitSeq(spec, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		name, what, ok := strings.Cut(entry, "=")
		if !ok {
			return nil, fmt.Errorf("%s: %q is not name=action", Variable, entry)
		}
		a, err := parseAction(what)
		if err != nil {
			return nil, err
		}
		actions[name] = a
	}
	return actions, nil
}
