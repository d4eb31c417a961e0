package guestagent

import (
	"sync"
	"sync/atomic"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// job is one operation that the host has requested.
type job struct {
	stream      *wire.Stream
	closedWrite atomic.Bool // the agent has shut down the writing side of its connection

	mu    sync.Mutex
	sized func(columns, rows uint16) // sets the size of the job's terminal; nil without a terminal
	// columns and rows are the terminal's last size; 0 until the host sends one.
	columns, rows uint16
}

func (j *job) run(op wire.Op, request []byte, version string, service Service) wire.Result {
	switch op {
	case wire.OpExec:
		var r wire.Exec
		if err := r.Parse(request); err != nil {
			return failed(wire.ClassInvalidArgument, err)
		}
		return j.exec(r)
	case wire.OpDial:
		var r wire.Dial
		if err := r.Parse(request); err != nil {
			return failed(wire.ClassInvalidArgument, err)
		}
		return j.dial(r)
	case wire.OpInfo:
		info, err := readInfo(version)
		if err != nil {
			return failed(wire.ClassInternal, err)
		}
		return wire.Result{Body: string(info.Append(nil))}
	case wire.OpStats:
		stats, err := readStats()
		if err != nil {
			return failed(wire.ClassInternal, err)
		}
		return wire.Result{Body: string(stats.Append(nil))}
	case wire.OpService:
		if service != nil {
			return j.serve(request, service)
		}
	}
	return wire.Result{Class: wire.ClassUnimplemented, Message: "tripod-agent " + version + " in the guest is too old for this operation"}
}

func failed(class wire.Class, err error) wire.Result {
	return wire.Result{Class: class, Message: err.Error()}
}
