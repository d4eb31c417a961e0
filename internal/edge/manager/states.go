package manager

// state is what a module does in this daemon. Only module.apply changes it.
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

// states are the states in the order of the documentation: what each means, what the record says then, and under which name the
// state is reported.
var states = []struct {
	state    state
	recorded recordState
	reported string
	means    string
}{
	{unrecorded, "", "pending", "it has an index, and no record yet"},
	{pending, recordCreated, "pending", "it is to run, and its runtime does not have it"},
	{restored, recordCreated, "pending", "it is to run, and an earlier daemon created it"},
	{lost, recordCreated, "pending", "it is to run, and ran when the connection to its runtime broke"},
	{creating, recordCreated, "creating", "its runtime has been asked to create it"},
	{running, recordCreated, "running", "it runs"},
	{cancelled, recordDeleting, "deleting", "it is to end, and its runtime does not have it"},
	{abandoned, recordDeleting, "deleting", "it is to end, and its runtime may have it"},
	{aborting, recordDeleting, "deleting", "it is to end, and its runtime has been asked to create it"},
	{deleting, recordDeleting, "deleting", "it is to end, and runs"},
	{exited, recordExited, "exited", "it has ended: its exit is recorded, cleaned up after and sent"},
	{unconcluded, recordExited, "exited", "it ended under an earlier daemon, which did not finish cleaning up"},
}

// loaded are the states of modules that an earlier daemon recorded.
var loaded = map[recordState]state{recordCreated: restored, recordDeleting: abandoned, recordExited: unconcluded}

// recorded is what the record says of a module in this state.
func (s state) recorded() recordState { return states[s.row()].recorded }

// reported is the state's name in the reported document and in the metrics.
func (s state) reported() string { return states[s.row()].reported }

func (s state) row() int {
	for i := range states {
		if states[i].state == s {
			return i
		}
	}
	panic("no state " + s) // module.state only has those of the table
}

// event is what moves a module.
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
	evStopped  event = "stopped"
)

var events = []struct {
	event event
	means string
}{
	{evRecorded, "its record is on the disk"},
	{evUp, "its runtime has started"},
	{evLaunch, "its launcher takes the next step"},
	{evMissing, "the runtime does not have it, when asked to adopt it"},
	{evRuns, "the runtime has created or adopted it"},
	{evRetry, "the runtime cannot create it now"},
	{evDelete, "its deletion is recorded"},
	{evExit, "it has ended, or cannot be created"},
	{evDetached, "a durable runtime is lost: its modules may run"},
	{evDied, "another runtime is lost, and its modules with it"},
	{evStopped, "such a runtime has ended as it was asked to"},
}

// action is what follows from a transition.
type action string

const (
	none     action = ""
	launch   action = "launch"
	create   action = "create"
	adopt    action = "adopt"
	end      action = "end"
	cancel   action = "cancel"
	release  action = "release"
	tellLost action = "tell lost"
	settle   action = "settle"
	conclude action = "conclude"
)

var actions = []struct {
	action action
	means  string
}{
	{launch, "start the launcher, if the runtime is up"},
	{create, "ask the runtime to create it"},
	{adopt, "ask the runtime to adopt it"},
	{end, "ask the runtime to end it, if that is up"},
	{cancel, "end it now if the runtime is down, otherwise wake the launcher"},
	{release, "the same, unless the runtime is durable: then its next start ends it"},
	{tellLost, "clean up, and report the exit `runtime-lost`; it stays in the record"},
	{settle, "record the exit, then conclude"},
	{conclude, "clean up, free the index, report the exit"},
}

type transition struct {
	to state
	do action
}

// transitions is all that can happen to a module. An event without an entry changes nothing.
var transitions = map[state]map[event]transition{
	unrecorded: {evRecorded: {pending, launch}, evDelete: {cancelled, cancel}, evExit: {exited, settle}, evStopped: {exited, settle}},
	pending: {evUp: {pending, launch}, evLaunch: {creating, create}, evDelete: {cancelled, cancel}, evExit: {exited, settle},
		evStopped: {exited, settle}},
	restored: {evUp: {restored, launch}, evLaunch: {restored, adopt}, evMissing: {pending, none}, evRuns: {running, none},
		evDelete: {abandoned, release}, evExit: {exited, settle}, evStopped: {exited, settle}},
	lost: {evUp: {lost, launch}, evLaunch: {lost, adopt}, evMissing: {pending, tellLost}, evRuns: {running, none},
		evDelete: {abandoned, release}, evExit: {exited, settle}},
	creating: {evRuns: {running, none}, evRetry: {pending, none}, evDelete: {aborting, none}, evExit: {exited, settle},
		evDetached: {pending, none}, evDied: {pending, none}, evStopped: {exited, settle}},
	running: {evDelete: {deleting, end}, evExit: {exited, settle}, evDetached: {lost, none}, evDied: {pending, tellLost},
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

// apply moves the module and returns what follows. The host's mu is held.
func (mod *module) apply(e event) action {
	t, ok := transitions[mod.state][e]
	if !ok {
		return none
	}
	mod.state = t.to
	return t.do
}
