package program

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/worker"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Default limits of a compilation.
const (
	defaultMaxInput = 256 << 20
	compilerMemory  = 2 << 30
	defaultMaxCPU   = 2 * time.Minute
)

// errLimit marks errors about an input that exceeds a limit.
var errLimit = errors.New("over the limit")

// compile compiles standard input to standard output and returns the exit code.
func compile(config workerapi.CompileConfig) int {
	err := compileWithin(config, os.Stdin, os.Stdout)
	switch {
	case err == nil:
		return workerapi.CompileOK
	case errors.Is(err, errLimit), errors.Is(err, errdefs.ErrResourceExhausted):
		return complain(err, workerapi.CompileLimit)
	case errors.Is(err, errdefs.ErrInvalidArgument):
		return complain(err, workerapi.CompileInvalid)
	}
	return complain(err, workerapi.CompileInternal)
}

func compileWithin(config workerapi.CompileConfig, in io.Reader, out io.Writer) error {
	maxInput := cmp.Or(config.MaxInput, defaultMaxInput)
	wasm, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	if err != nil {
		return fmt.Errorf("read the component: %w", err)
	}
	if int64(len(wasm)) > maxInput {
		return fmt.Errorf("the component is larger than %d bytes: %w", maxInput, errLimit)
	}
	maxCPU, maxMemory := cmp.Or(config.MaxCPU, defaultMaxCPU), cmp.Or(config.MaxMemory, compilerMemory)
	if err := limit(maxCPU, maxMemory); err != nil {
		return err
	}
	e, err := engine.New(engine.Config{Quick: config.Quick})
	if err != nil {
		return err
	}
	code, err := e.Compile(context.Background(), wasm, worker.CompileOptions())
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, bytes.NewReader(code)); err != nil {
		return fmt.Errorf("write the code: %w", err)
	}
	return nil
}

// limit bounds the CPU time and memory of the process. The compiler cannot be cancelled, so the process prints an error
// and exits when it exceeds a limit. The kernel enforces somewhat higher limits, in case the process cannot exit by
// itself.
func limit(cpu time.Duration, memory int64) error {
	seconds := uint64(max(cpu.Round(time.Second)/time.Second, 1))
	mapped := uint64(memory)*2 + 1<<30 // Go maps more memory than it uses
	for _, l := range []struct {
		resource int
		soft     uint64
		hard     uint64
	}{
		{unix.RLIMIT_CORE, 0, 0},
		{unix.RLIMIT_CPU, seconds, seconds + 5},
		{unix.RLIMIT_DATA, mapped, mapped},
	} {
		if err := unix.Setrlimit(l.resource, &unix.Rlimit{Cur: l.soft, Max: l.hard}); err != nil {
			return fmt.Errorf("limit the compiler: %w", err)
		}
	}
	over := make(chan os.Signal, 1)
	signal.Notify(over, syscall.SIGXCPU)
	go func() {
		<-over
		os.Exit(complain(fmt.Errorf("compilation needs more than %v of CPU time: %w", cpu, errLimit), workerapi.CompileLimit))
	}()
	go func() {
		for range time.Tick(5 * time.Millisecond) { // no event reports memory use
			if held, err := process.Resident(); err == nil && held > memory {
				os.Exit(complain(fmt.Errorf("compilation needs more than %d bytes of memory: %w", memory, errLimit), workerapi.CompileLimit))
			}
		}
	}()
	return nil
}

// oneLine replaces each run of white space, including line breaks, with a single space.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
