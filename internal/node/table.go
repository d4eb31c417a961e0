package node

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// State is a row of the state table: one of the seven states of seed 1, or Retained. The empty State means that the pod
// does not exist.
type State string

// The seven states. A unit pod is in one of them as a whole. In a pod with many containers the sandbox is Initiated or
// Killed, and each container moves from Created to Removed on its own.
const (
	Initiated State = "Initiated"
	Created   State = "Created"
	Starting  State = "Starting"
	Running   State = "Running"
	Stopped   State = "Stopped"
	Removed   State = "Removed"
	Killed    State = "Killed"
)

// Retained is the state of a unit pod's previous attempts in the table. It is not one of the seven, because the pod
// itself is in another state.
const Retained State = "Retained"

// States lists the seven states in the order of seed 1.
var States = [...]State{Initiated, Created, Starting, Running, Stopped, Removed, Killed}

// Call is a CRI call that orders a transition.
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

var Calls = [...]Call{RunPodSandbox, CreateContainer, StartContainer, StopContainer, RemoveContainer, StopPodSandbox, RemovePodSandbox}

// Verdict is the table's answer for a call in a state.
type Verdict rune

// The verdicts, with the symbols of seed 1.
const (
	Valid      Verdict = '✔'
	Idempotent Verdict = '↻'
	Refused    Verdict = '✘'
	// Walk marks a call that CRI v1 requires although the table has no edge for it. The transition combines edges of
	// the table.
	Walk Verdict = '⇒'
)

// unitTable is the state table of seed 1 for unit pods, with a row per state and a column per call. A RunPodSandbox
// request names no pod, so the column Run is about a repeated call with the pod's metadata. That call is Idempotent in
// every state in which the sandbox is ready. From every state except Killed, RemovePodSandbox walks through Killed,
// because CRI v1 requires that every sandbox can be removed. RemoveContainer in Killed is not refused, as it is in seed 1: a
// kubelet removes each container before its sandbox, and would log an error each time.
var unitTable = table{
	//          Run  Create Start Stop Remove StopPod RemovePod
	Initiated: {'↻', '✔', '✘', '✘', '✘', '✔', '⇒'},
	Created:   {'↻', '↻', '✔', '✘', '✘', '✔', '⇒'},
	Starting:  {'↻', '↻', '↻', '✔', '✘', '✔', '⇒'},
	Running:   {'↻', '↻', '↻', '✔', '✘', '✔', '⇒'},
	Stopped:   {'↻', '✘', '✔', '↻', '✔', '✔', '⇒'},
	Removed:   {'↻', '✔', '✘', '✘', '↻', '✔', '⇒'},
	Killed:    {'✘', '✘', '✘', '✘', '↻', '↻', '✔'},
	Retained:  {'✘', '✘', '✘', '↻', '✔', '✘', '✘'},
}

// containerTable is the state table for one container in a pod that can have many. It differs from unitTable only where
// CRI v1 requires a difference: any container can be removed, and stopping a container that does not run succeeds.
// Also, containers in a stopped sandbox can still be stopped and removed; the row Killed is for such a container after
// it has ended.
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

func (t table) verdict(s State, c Call) Verdict {
	if i := slices.Index(Calls[:], c); i >= 0 {
		return t[s][i]
	}
	return Refused
}

// Decide returns what a call does to a unit pod in state s or, in other pods, to a container in state s.
func Decide(unit bool, s State, c Call) Verdict {
	if unit {
		return unitTable.verdict(s, c)
	}
	return containerTable.verdict(s, c)
}

// refusal returns the error for a Refused call. It names the state and the valid calls.
func refusal(unit bool, id string, s State, c Call) error {
	var valid []string
	for _, other := range Calls {
		if v := Decide(unit, s, other); v == Valid || v == Walk {
			valid = append(valid, string(other))
		}
	}
	return fmt.Errorf("%s: %s is %s; valid now: %s: %w", c, id, s, strings.Join(valid, ", "), errdefs.ErrFailedPrecondition)
}
