package orchestrator

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// Status is the state of a record, as in REST and in messages.
type Status string

// The states. Managers and runtimes are Alive or Dead.
const (
	Alive   Status = "A"
	Queued  Status = "Q" // waits for a free slot
	Exiting Status = "E" // its deletion is ordered
	Killed  Status = "K" // will be created again: its runtime is lost, or it waits for a restart
	Dead    Status = "D"
)

// event moves a module from one state to another.
type event string

const (
	place   event = "place"   // a runtime is ordered to create it
	wait    event = "wait"    // no runtime has a free slot
	remove  event = "delete"  // a client deletes the module
	exit    event = "exit"    // it has ended
	restart event = "restart" // it has ended, and will be created again
	lose    event = "lose"    // its runtime is lost
	revive  event = "revive"  // its runtime was only silent
)

// unborn is the state of a module without a record.
const unborn Status = ""

// transitions holds all transitions of a module. Dead is final: a later module with the same uuid gets a new record.
var transitions = map[Status]map[event]Status{
	unborn:  {place: Alive, wait: Queued},
	Queued:  {place: Alive, remove: Dead},
	Alive:   {remove: Exiting, exit: Dead, restart: Killed, lose: Killed},
	Exiting: {remove: Exiting, exit: Dead, lose: Dead},
	Killed:  {place: Alive, revive: Alive, wait: Queued, remove: Dead, exit: Dead, restart: Killed},
}

// next returns the state after an event. If the event cannot happen in this state, next returns
// errdefs.ErrFailedPrecondition.
func (s Status) next(e event) (Status, error) {
	to, ok := transitions[s][e]
	if !ok {
		return s, fmt.Errorf("a module that is %s: %s is not possible: %w", s, e, errdefs.ErrFailedPrecondition)
	}
	return to, nil
}

// holds reports whether a module in this state occupies a slot of its runtime. A killed module keeps its slot.
func (s Status) holds() bool { return s == Alive || s == Exiting || s == Killed }
