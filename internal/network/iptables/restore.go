package iptables

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
)

// Restore changes a table by lines in the format of iptables-save, and keeps the other rules. If Restore fails, none
// of the lines has been applied. It returns ErrFailedPrecondition if the programs are not installed, ctx's cause if ctx
// ends, and otherwise ErrUnavailable.
//
// An execution reads the whole table, and only one can run at a time. So what several callers want meanwhile is applied
// by the next execution, for all of them.
func Restore(ctx context.Context, family Family, table string, lines ...string) error {
	return restorers[tableOf{family, table}].restore(&change{ctx: ctx, lines: lines, done: make(chan error, 1)})
}

type tableOf struct {
	family Family
	name   string
}

var restorers = func() map[tableOf]*restorer {
	all := map[tableOf]*restorer{}
	for _, family := range []Family{V4, V6} {
		for _, name := range []string{NAT, Filter} {
			all[tableOf{family, name}] = &restorer{table: tableOf{family, name}, turn: make(chan struct{}, 1)}
		}
	}
	return all
}()

// restorer executes the changes of one table.
type restorer struct {
	table tableOf
	turn  chan struct{} // full while a caller executes changes

	mu      sync.Mutex
	waiting []*change
}

type change struct {
	ctx   context.Context
	lines []string
	done  chan error
}

// restore returns once another caller has executed the change, or executes it together with all that wait. If the
// caller's context ends first, the change is withdrawn.
func (r *restorer) restore(c *change) error {
	r.mu.Lock()
	r.waiting = append(r.waiting, c)
	r.mu.Unlock()
	select {
	case err := <-c.done:
		return err
	case r.turn <- struct{}{}:
		r.execute(r.take())
		<-r.turn
		return <-c.done
	case <-c.ctx.Done():
		if r.withdraw(c) {
			return context.Cause(c.ctx)
		}
		return <-c.done // it is being executed
	}
}

func (r *restorer) take() []*change {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.waiting
	r.waiting = nil
	return taken
}

// withdraw removes a change that nobody has begun to execute, and reports whether it has.
func (r *restorer) withdraw(c *change) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.Index(r.waiting, c)
	if i < 0 {
		return false
	}
	r.waiting = slices.Delete(r.waiting, i, i+1)
	return true
}

// execute applies changes in one execution. If the program refuses them, execute applies them one by one, so that a bad
// change spoils no other.
func (r *restorer) execute(changes []*change) {
	if len(changes) > 1 {
		var lines []string
		for _, c := range changes {
			lines = append(lines, c.lines...)
		}
		// Without the callers' contexts: the end of one must not affect the others. The execution has its own time limit.
		if err := r.run(context.Background(), lines); !errdefs.IsUnavailable(err) {
			for _, c := range changes {
				c.done <- err
			}
			return
		}
	}
	for _, c := range changes {
		c.done <- r.run(c.ctx, c.lines)
	}
}

func (r *restorer) run(ctx context.Context, lines []string) error {
	input := "*" + r.table.name + "\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
	_, err := run(ctx, r.table.family.String()+"-restore", input, "--wait", "--noflush")
	return err
}
