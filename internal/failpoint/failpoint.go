// Package failpoint names the lines of the program at which a test may let it fail, hang, wait, panic or die.
//
// A point is a package-level variable made by New, hit by Hit. It does nothing unless the environment variable
// TRIPOD_FAILPOINTS arms it when the process starts:
//
//	TRIPOD_FAILPOINTS="node.run-sandbox.intent=kill,node.start-container.effect=error(disk on fire)"
//
// Actions: kill (SIGKILL to this process), panic, error(TEXT), hang (until the context ends), delay(DURATION).
// A prefix N* lets the action happen at the first N hits only: 1*error(once).
// Names lists all points, so that the crash matrix visits every one without a list of its own.
package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Variable is the environment variable that arms points.
const Variable = "TRIPOD_FAILPOINTS"

var (
	mu    sync.Mutex
	known = map[string]*Point{}
	// armedAtStart holds the actions of the environment, by point name.
	armedAtStart = sync.OnceValues(func() (map[string]*action, error) { return parse(os.Getenv(Variable)) })
)

// Point is one named line.
type Point struct {
	name   string
	action atomic.Pointer[action]
}

// New makes the point called name, "package.operation.line". Two points of one name are a programming error and panic.
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

// Names lists every point of the program, sorted.
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

// Check reports an environment that arms points wrongly: bad syntax or unknown names.
func Check() error {
	actions, err := armedAtStart()
	if err != nil {
		return err
	}
	names := Names()
	for name := range actions {
		if _, ok := slices.BinarySearch(names, name); !ok {
			return fmt.Errorf("%s names %q, which is no fail point", Variable, name)
		}
	}
	return nil
}

// Arm sets the action of the point called name, in the syntax of the environment; "" disarms it. For tests in process.
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

// Do performs the action spec at once, as a point called name would; "" is nothing. It serves components that are told
// where to fail by their own configuration.
func Do(ctx context.Context, name, spec string) error {
	if spec == "" {
		return nil
	}
	a, err := parseAction(spec)
	if err != nil {
		return err
	}
	return a.do(ctx, name)
}

// Hit does what the point is armed for; nil when it is not armed.
func (p *Point) Hit(ctx context.Context) error {
	a := p.action.Load()
	if a == nil {
		return nil
	}
	return a.do(ctx, p.name)
}

type action struct {
	kind  string
	text  string
	delay time.Duration
	left  atomic.Int64 // hits that still act; negative: always
}

func (a *action) do(ctx context.Context, name string) error {
	if a.left.Load() >= 0 && a.left.Add(-1) < 0 {
		a.left.Store(0)
		return nil
	}
	switch a.kind {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "hang":
		<-ctx.Done()
		return fmt.Errorf("fail point %s: %w", name, context.Cause(ctx))
	case "panic":
		panic("fail point " + name)
	case "delay":
		select {
		case <-time.After(a.delay):
			return nil
		case <-ctx.Done():
			return fmt.Errorf("fail point %s: %w", name, context.Cause(ctx))
		}
	default:
		return fmt.Errorf("fail point %s: %s", name, a.text)
	}
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

func parseAction(spec string) (*action, error) {
	a := &action{}
	a.left.Store(-1)
	if count, rest, ok := strings.Cut(spec, "*"); ok {
		n, err := strconv.ParseInt(count, 10, 32)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("fail point action %q: %q is not a count", spec, count)
		}
		a.left.Store(n)
		spec = rest
	}
	kind, argument, _ := strings.Cut(strings.TrimSuffix(spec, ")"), "(")
	a.kind, a.text = kind, argument
	switch kind {
	case "kill", "hang", "panic":
		return a, nil
	case "error":
		if a.text == "" {
			a.text = "made to fail"
		}
		return a, nil
	case "delay":
		var err error
		if a.delay, err = time.ParseDuration(argument); err != nil {
			return nil, errors.Join(fmt.Errorf("fail point action %q", spec), err)
		}
		return a, nil
	default:
		return nil, fmt.Errorf("fail point action %q: know kill, hang, panic, error(TEXT), delay(DURATION)", spec)
	}
}
