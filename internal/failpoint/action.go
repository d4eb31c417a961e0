package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Do performs an action, as a fail point with the given name would. An empty spec means no action. Do is for components
// whose own configuration says where they fail.
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

type action struct {
	kind      string
	text      string
	delay     time.Duration
	counted   bool         // whether only the first hits have an effect
	remaining atomic.Int64 // if counted: number of further hits that have an effect; not positive means none
}

func (a *action) do(ctx context.Context, name string) error {
	if a.counted && a.remaining.Add(-1) < 0 {
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

func parseAction(spec string) (*action, error) {
	a := &action{}
	if count, rest, ok := strings.Cut(spec, "*"); ok {
		n, err := strconv.ParseInt(count, 10, 32)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("fail point action %q: %q is not a count", spec, count)
		}
		a.counted = true
		a.remaining.Store(n)
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
		return nil, fmt.Errorf("fail point action %q is not kill, hang, panic, error(TEXT) or delay(DURATION)", spec)
	}
}
