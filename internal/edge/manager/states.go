package manager

// state is the state of a module in this daemon. Only module.apply changes it.
type state string

const (
	unrecorded  state = "unrecorded"
	pending     state = "pending"
	restored    state = "restored"
	lost        state = "lost"
	creating    state = "creating"
	running     state = "running"
	cancelled   state = "cancelled"
	abandoned   state = "abandoned"
	aborting    state = "aborting"
	deleting    state = "deleting"
	exited      state = "exited"
	unconcluded state = "unconcluded"
)

// states lists the states in the order of the documentation. Each entry has the state in the record, the reported name
// and the meaning.
var states = []struct {
	state    state
	recorded recordState
	reported string
	means    string
}{
	{unrecorded, "", "pending", "it has an index, and no record yet"},
	{pending, recordCreated, "pending", "it should run; its runtime does not have it"},
	{restored, recordCreated, "pending", "it should run; an earlier daemon created it"},
	{lost, recordCreated, "pending", "it should run; it ran when the connection to its runtime broke"},
	{creating, recordCreated, "creating", "its runtime was asked to create it"},
	{running, recordCreated, "running", "it runs"},
	{cancelled, recordDeleting, "deleting", "it should end; its runtime does not have it"},
	{abandoned, recordDeleting, "deleting", "it should end; its runtime may have it"},
	{aborting, recordDeleting, "deleting", "it should end; its runtime was asked to create it"},
	{deleting, recordDeleting, "deleting", "it should end; it runs"},
	{exited, recordExited, "exited", "it has ended; its exit is being recorded and sent, and its files removed"},
	{unconcluded, recordExited, "exited", "it ended under an earlier daemon, which did not finish cleaning up"},
}

// loaded maps the state that an earlier daemon recorded to a module's first state in this daemon.
var loaded = map[recordState]state{recordCreated: restored, recordDeleting: abandoned, recordExited: unconcluded}

// recorded returns the state that the record has for a module in state s.
func (s state) recorded() recordState { return states[s.row()].recorded }

// reported returns the name of s in the reported document and in the metrics.
func (s state) reported() string { return states[s.row()].reported }

func (s state) row() int {
	for i := range states {
		if states[i].state == s {
			return i
		}
	}
	panic("no state " + s) // module.state has only states of the table
}

// event moves a module from one state to another.
type event string

const (
	evRecorded event = "recorded"
	evUp       event = "up"
	evLaunch   event = "launch"
	evMissing  event = "missing"
	evRuns     event = "runs"
	evRetry    event = "retry"
	evDelete   event = "delete"
	evExit     event = "exit"
	evDetached event = "detached"
	evDied     event = "died"
	evBlamed   event = "blamed"
	evStopped  event = "stopped"
)

var events = []struct {
	event event
	means string
}{
	{evRecorded, "its record is on the disk"},
	{evUp, "its runtime has started"},
	{evLaunch, "its launcher takes the next step"},
	{evMissing, "the runtime, asked to adopt it, does not have it"},
	{evRuns, "the runtime has created or adopted it"},
	{evRetry, "the runtime cannot create it now"},
	{evDelete, "its deletion is recorded"},
	{evExit, "it has ended, or cannot be created"},
	{evDetached, "a durable runtime is lost: its modules may run"},
	{evDied, "a runtime that is not durable is lost, and its modules with it"},
	{evBlamed, "its runtime has died too often while it ran, and has lived without it"},
	{evStopped, "a runtime that is not durable has ended because it was stopped"},
}

// action is what the manager does after a transition.
type action string

const (
	none       action = ""
	launch     action = "launch"
	create     action = "create"
	adopt      action = "adopt"
	end        action = "end"
	cancel     action = "cancel"
	release    action = "release"
	reportLost action = "report lost"
	settle     action = "settle"
	conclude   action = "conclude"
)

var actions = []struct {
	action action
	means  string
}{
	{launch, "start the launcher, if the runtime is up"},
	{create, "ask the runtime to create it"},
	{adopt, "ask the runtime to adopt it"},
	{end, "ask the runtime to end it, if the runtime is up"},
	{cancel, "end it now if the runtime is down or no launcher runs, otherwise wake the launcher"},
	{release, "like cancel, but if the runtime is durable, its next start ends it"},
	{reportLost, "clean up, and report the exit `runtime-lost`; it stays in the record"},
	{settle, "record the exit, then conclude"},
	{conclude, "clean up, free the index, report the exit"},
}

type transition struct {
	to state
	do action
}

// transitions holds all transitions of a module. An event without an entry changes nothing.
var transitions = map[state]map[event]transition{
	unrecorded: {evRecorded: {pending, launch}, evDelete: {cancelled, cancel}, evExit: {exited, settle}, evStopped: {exited, settle}},
	pending: {evUp: {pending, launch}, evLaunch: {creating, create}, evDelete: {cancelled, cancel}, evExit: {exited, settle},
		evBlamed: {exited, settle}, evStopped: {exited, settle}},
	restored: {evUp: {restored, launch}, evLaunch: {restored, adopt}, evMissing: {pending, none}, evRuns: {running, none},
		evDelete: {abandoned, release}, evExit: {exited, settle}, evStopped: {exited, settle}},
	lost: {evUp: {lost, launch}, evLaunch: {lost, adopt}, evMissing: {pending, reportLost}, evRuns: {running, none},
		evDelete: {abandoned, release}, evExit: {exited, settle}},
	creating: {evRuns: {running, none}, evRetry: {pending, none}, evDelete: {aborting, none}, evExit: {exited, settle},
		evDetached: {pending, none}, evDied: {pending, none}, evStopped: {exited, settle}},
	running: {evDelete: {deleting, end}, evExit: {exited, settle}, evDetached: {lost, none}, evDied: {pending, reportLost},
		evStopped: {exited, settle}},
	cancelled: {evUp: {cancelled, launch}, evLaunch: {exited, settle}, evDelete: {cancelled, cancel}, evExit: {exited, settle},
		evDied: {exited, settle}, evStopped: {exited, settle}},
	abandoned: {evUp: {abandoned, launch}, evLaunch: {abandoned, adopt}, evMissing: {cancelled, none}, evRuns: {deleting, end},
		evDelete: {abandoned, release}, evExit: {exited, settle}, evDied: {exited, settle}, evStopped: {exited, settle}},
	aborting: {evRuns: {deleting, end}, evRetry: {cancelled, none}, evExit: {exited, settle}, evDetached: {cancelled, none},
		evDied: {exited, settle}, evStopped: {exited, settle}},
	deleting: {evDelete: {deleting, end}, evExit: {exited, settle}, evDetached: {abandoned, none}, evDied: {exited, settle},
		evStopped: {exited, settle}},
	exited:      {},
	unconcluded: {evUp: {exited, conclude}},
}

// apply changes the module to the state that follows e, and returns the action to take. The caller holds the host's mu.
func (mod *module) apply(e event) action {
	t, ok := transitions[mod.state][e]
	if !ok {
		return none
	}
	mod.state = t.to
	return t.do
}
