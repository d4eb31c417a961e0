package manager

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// TestDocumentedTable compares docs/edge-states.md with the table; UPDATE=1 in the environment writes it.
func TestDocumentedTable(t *testing.T) {
	const path = "../../../docs/edge-states.md"
	want := "# The states of a module\n\nPrinted from `internal/edge/manager/states.go`.\n\n" + markdown()
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is not what the table says; run UPDATE=1 go test ./internal/edge/manager -run DocumentedTable", path)
	}
}

// TestTableIsWhole: states, events and actions are documented, each state can be reached and left, and every state
// handles an exit.
func TestTableIsWhole(t *testing.T) {
	reached := map[state]bool{unrecorded: true}
	for _, s := range loaded {
		reached[s] = true
	}
	for _, row := range transitions {
		for e, to := range row {
			reached[to.to] = true
			if !slices.ContainsFunc(events, func(d struct {
				event event
				means string
			}) bool {
				return d.event == e
			}) {
				t.Errorf("the event %s is not documented", e)
			}
			if to.do != none && !slices.ContainsFunc(actions, func(d struct {
				action action
				means  string
			}) bool {
				return d.action == to.do
			}) {
				t.Errorf("the action %s is not documented", to.do)
			}
		}
	}
	for _, s := range states {
		if !reached[s.state] {
			t.Errorf("no transition leads to %s", s.state)
		}
		row, ok := transitions[s.state]
		if !ok {
			t.Errorf("the table has no row for %s", s.state)
		}
		if _, ends := row[evExit]; !ends && s.recorded != recordExited {
			t.Errorf("an exit in %s is forgotten", s.state)
		}
		if _, gone := row[evStopped]; !gone && s.recorded != recordExited && s.state != lost {
			t.Errorf("a module in %s outlives the runtime that was stopped", s.state)
		}
	}
	if len(states) != len(transitions) {
		t.Errorf("%d states are documented, the table has %d", len(states), len(transitions))
	}
}

// markdown prints the tables.
func markdown() string {
	var b strings.Builder
	b.WriteString("A cell has the next state and, after a slash, the action that follows. An empty cell: the event changes nothing.\n\n| state |")
	rule := "\n|---|"
	for _, e := range events {
		fmt.Fprintf(&b, " %s |", e.event)
		rule += "---|"
	}
	b.WriteString(rule)
	for _, s := range states {
		fmt.Fprintf(&b, "\n| **%s** |", s.state)
		for _, e := range events {
			cell := ""
			if t, ok := transitions[s.state][e.event]; ok {
				if cell = " " + string(t.to); t.do != none {
					cell += " / " + string(t.do)
				}
			}
			b.WriteString(cell + " |")
		}
	}
	b.WriteString("\n\n| state | the module | in the record | reported as |\n|---|---|---|---|\n")
	for _, s := range states {
		fmt.Fprintf(&b, "| **%s** | %s | %s | %s |\n", s.state, s.means, s.recorded, s.reported)
	}
	b.WriteString("\nA daemon that starts has each recorded module as")
	for i, r := range []recordState{recordCreated, recordDeleting, recordExited} {
		fmt.Fprintf(&b, "%s %s (recorded as %s)", []string{"", ",", " or"}[i], loaded[r], r)
	}
	b.WriteString(".\n\n| event | |\n|---|---|\n")
	for _, e := range events {
		fmt.Fprintf(&b, "| **%s** | %s |\n", e.event, e.means)
	}
	b.WriteString("\n| action | |\n|---|---|\n")
	for _, a := range actions {
		fmt.Fprintf(&b, "| **%s** | %s |\n", a.action, a.means)
	}
	return b.String()
}
