package network

import (
	"context"
	"fmt"
	"time"

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
		output, err := call.Run(ctx) // recovers from panics
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
