package node

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// State is one of the seven states of seed 1; the empty State is ∅, the pod that does not exist.
type State string

// The seven states. A unit pod is in one of them as a whole. In a pod of many containers the sandbox is Initiated
// or Killed and each container goes from Created to Removed by itself.
const (
	Initiated State = "Initiated"
	Created   State = "Created"
	Starting  State = "Starting"
	Running   State = "Running"
	Stopped   State = "Stopped"
	Removed   State = "Removed"
	Killed    State = "Killed"
)

// Retained is the state in which orders meet a previous attempt of a unit pod's container. It is none of the seven: the
// pod itself has gone on.
const Retained State = "Retained"

// States lists the seven states in the order of seed 1.
var States = [...]State{Initiated, Created, Starting, Running, Stopped, Removed, Killed}

// Call is one of the CRI calls that order a transition.
type Call string

// The calls, in the order of the states that they lead to.
const (
	RunPodSandbox    Call = "RunPodSandbox"
	CreateContainer  Call = "CreateContainer"
	StartContainer   Call = "StartContainer"
	StopContainer    Call = "StopContainer"
	RemoveContainer  Call = "RemoveContainer"
	StopPodSandbox   Call = "StopPodSandbox"
	RemovePodSandbox Call = "RemovePodSandbox"
)

// Calls lists the calls in that order.
var Calls = [...]Call{RunPodSandbox, CreateContainer, StartContainer, StopContainer, RemoveContainer, StopPodSandbox, RemovePodSandbox}

// Verdict is what the table says of a call in a state.
type Verdict rune

// The verdicts, with the signs of seed 1.
const (
	Valid      Verdict = '✔'
	Idempotent Verdict = '↻'
	Refused    Verdict = '✘'
	// Walk is an edge that CRI v1 demands beyond the table: it goes over the table's own edges, never a new one.
	Walk Verdict = '⇒'
)

// unitTable is the state table of seed 1, with a row per state and a column per call, for pods whose container is
// the pod. RunPodSandbox names no pod: it is Idempotent where a repeat with the same metadata finds the sandbox
// ready. RemovePodSandbox outside Killed walks through Killed, as CRI v1 demands of every sandbox.
var unitTable = table{
	//          Run  Create Start Stop Remove StopPod RemovePod
	Initiated: {'↻', '✔', '✘', '✘', '✘', '✔', '⇒'},
	Created:   {'↻', '↻', '✔', '✘', '✘', '✔', '⇒'},
	Starting:  {'↻', '↻', '↻', '✔', '✘', '✔', '⇒'},
	Running:   {'↻', '↻', '↻', '✔', '✘', '✔', '⇒'},
	Stopped:   {'↻', '✘', '✔', '↻', '✔', '✔', '⇒'},
	Removed:   {'↻', '✔', '✘', '✘', '↻', '✔', '⇒'},
	Killed:    {'✘', '✘', '✘', '✘', '✘', '↻', '✔'},
	Retained:  {'✘', '✘', '✘', '↻', '✔', '✘', '✘'},
}

// containerTable is the table of one container in a pod of many. It differs from unitTable only where CRI v1 demands
// it: a container of any state can be removed, a container that does not run is stopped already, and in a stopped
// sandbox (the row Killed, for a container that has ended) containers can still be stopped and removed.
var containerTable = table{
	Initiated: {'↻', '✔', '✘', '✘', '✘', '✔', '⇒'},
	Created:   {'↻', '↻', '✔', '↻', '⇒', '✔', '⇒'},
	Starting:  {'↻', '↻', '↻', '✔', '⇒', '✔', '⇒'},
	Running:   {'↻', '↻', '↻', '✔', '⇒', '✔', '⇒'},
	Stopped:   {'↻', '✘', '✔', '↻', '✔', '✔', '⇒'},
	Removed:   {'↻', '✔', '✘', '↻', '↻', '✔', '⇒'},
	Killed:    {'✘', '✘', '✘', '↻', '✔', '↻', '✔'},
}

type table map[State][len(Calls)]Verdict

// verdict is the cell of state and call.
func (t table) verdict(s State, c Call) Verdict {
	for i, call := range Calls {
		if call == c {
			return t[s][i]
		}
	}
	return Refused
}

// Decide tells what call does to a pod, or to a container of a pod of many, that is in state s.
func Decide(unit bool, s State, c Call) Verdict {
	if unit {
		return unitTable.verdict(s, c)
	}
	return containerTable.verdict(s, c)
}

// refusal is the error of a Refused cell: what was asked, the state it met, the calls that would be valid.
func refusal(unit bool, id string, s State, c Call) error {
	var valid []string
	for _, other := range Calls {
		if v := Decide(unit, s, other); v == Valid || v == Walk {
			valid = append(valid, string(other))
		}
	}
	return fmt.Errorf("%s: %s is %s; valid now: %s: %w", c, id, s, strings.Join(valid, ", "), errdefs.ErrFailedPrecondition)
}

// unitNotes are what a kubelet needs beyond unitTable: no edges, but walks over its own and what lists show.
const unitNotes = `A kubelet restarts a container by creating its next attempt. Of a unit pod that is the walk Stopped → Removed → Created: a
CreateContainer in Stopped whose ` + "`metadata.attempt`" + ` is higher than the container's is valid, and so is one in Created, which
replaces the container. The same attempt in Stopped is refused, as the table says.

Each attempt has an ID of its own, and the unit's ID means the newest one. The attempt that ended stays in the record and in lists, as
Exited, with its reason, code and log path, until RemoveContainer of its own ID or the end of the pod; the 16 newest are kept. It cannot
be started again, and stopping it succeeds.

A kubelet's garbage collection removes containers before their sandbox. RemoveContainer in Killed is refused, as the table
says; from then on ListContainers leaves the container out, and the kubelet removes the sandbox. ContainerStatus still answers.

`

// Markdown prints both tables for the documentation.
func Markdown() string {
	var b strings.Builder
	for _, t := range []struct {
		title, notes string
		table        table
	}{{"Unit pods", unitNotes, unitTable}, {"Containers in a pod of many", "", containerTable}} {
		fmt.Fprintf(&b, "### %s\n\n| state |", t.title)
		for _, c := range Calls {
			fmt.Fprintf(&b, " %s |", c)
		}
		b.WriteString("\n|---|" + strings.Repeat(":-:|", len(Calls)) + "\n")
		for _, s := range States {
			fmt.Fprintf(&b, "| **%s** |", s)
			for _, v := range t.table[s] {
				fmt.Fprintf(&b, " %c |", v)
			}
			b.WriteByte('\n')
		}
		b.WriteString("\n" + t.notes)
	}
	return b.String()
}
