// Package program implements the program tripod-wasm. Depending on the arguments, the program drops its privileges and
// runs a worker or the node's dialer, or it compiles one component.
package program

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const usage = "usage: tripod-wasm worker CONFIG | dialer CONFIG | compile CONFIG | fingerprint | version (the daemon starts it)"

// exitUsage is the exit code for wrong arguments (EX_USAGE in sysexits.h).
const exitUsage = 64

// Main runs the program and returns its exit code. The worker reports the version in its log and to the daemon.
func Main(version string, args []string) int {
	switch {
	case len(args) == 2 && args[0] == "worker":
		var config workerapi.WorkerConfig
		if err := parse(args[1], &config); err != nil {
			return complain(err, exitUsage)
		}
		if err := runWorker(config, version); err != nil {
			return complain(err, 1)
		}
	case len(args) == 2 && args[0] == "dialer":
		var config workerapi.DialerConfig
		if err := parse(args[1], &config); err != nil {
			return complain(err, exitUsage)
		}
		if err := runDialer(config, version); err != nil {
			return complain(err, 1)
		}
	case len(args) == 2 && args[0] == "compile":
		var config workerapi.CompileConfig
		if err := parse(args[1], &config); err != nil {
			return complain(err, exitUsage)
		}
		return compile(config)
	case len(args) == 1 && args[0] == "fingerprint":
		fmt.Println(engine.Fingerprint())
	case len(args) == 1 && (args[0] == "version" || args[0] == "--version"):
		fmt.Println("tripod-wasm", version)
	default:
		return complain(errors.New(usage), exitUsage)
	}
	return 0
}

func parse(text string, config any) error {
	if err := json.Unmarshal([]byte(text), config); err != nil {
		return fmt.Errorf("parse the configuration: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// complain prints the error on one line and returns the given exit code.
func complain(err error, code int) int {
	fmt.Fprintln(os.Stderr, "tripod-wasm:", oneLine(err.Error()))
	return code
}
