package network

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network/builtin"
)

// inProcessCall is an execution of a plugin in this process, such as *builtin.Call. After ctx ends, Run returns as soon
// as the current kernel request is done, which can take a while.
type inProcessCall interface {
	Run(ctx context.Context) (output []byte, err error)
}

func planBuiltin(plugins *builtin.Plugins) func(string, []byte, []string) (inProcessCall, error) {
	return func(path string, stdin []byte, environ []string) (inProcessCall, error) {
		call, why := plugins.Plan(path, stdin, environ)
		if why != nil {
			return nil, why
		}
		return call, nil
	}
}

// rehearsal counts the plugins of a chain that would run in this process. libcni runs a chain with a rehearsal in its
// context (rehearsalKey) without any effect, because libcni alone knows what it gives to each plugin.
type rehearsal struct{ plugins int } // plugins that are left

type rehearsalKey struct{}

var errRehearsed = errors.New("rehearsed")

// note takes the result of planning one plugin. It ends the rehearsal with an error at the first executable, and at the
// end of the chain, before libcni removes the cached result of ADD.
func (r *rehearsal) note(_ inProcessCall, why error) error {
	if why != nil {
		return why
	}
	if r.plugins--; r.plugins == 0 {
		return errRehearsed
	}
	return nil
}

// runInProcess runs the call and waits until it returns or ctx ends. It calls free when the call returns, even if ctx
// ended earlier. Until then, the next execution for the same container (usually the roll-back's DEL) must wait.
func (e *pluginExec) runInProcess(ctx context.Context, call inProcessCall, path string, environ []string, free func()) ([]byte, error) {
	type outcome struct {
		output []byte
		err    error
	}
	command := cniVariable(environ, "CNI_COMMAND")
	done := make(chan outcome, 1)
	start := time.Now()
	go func() {
		var output []byte
		err := guard.Call(e.log, "CNI plugin", func() (err error) {
			output, err = call.Run(ctx)
			return err
		})
		free()
		e.log.Debug("CNI plugin ran in this process", "plugin", path, "command", command, "took", time.Since(start), "err", err)
		done <- outcome{output, err}
	}()
	failure := &PluginError{Plugin: path, Command: command}
	select {
	case o := <-done:
		if o.err == nil {
			return o.output, nil
		}
		failure.Cause = o.err
	case <-ctx.Done():
		failure.Cause = fmt.Errorf("%w (the kernel has not answered yet)", context.Cause(ctx))
	}
	return nil, failure
}
