package node

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// seedTable is the table of seed 1, without the column for a missing pod. A dot is a blank cell ("impossible").
const seedTable = `
              Initiated Created Starting Running Stopped Removed Killed
   Initiated      .        ✔       ✘        .       ✘       ✘      ✔
   Created        .        ↻       ✔        .       ✘       ✘      ✔
   Starting       .        ↻       ↻        ✔       ✔       ✘      ✔
   Running        .        ↻       ↻        .       ✔       ✘      ✔
   Stopped        .        ✘       ✔        .       ↻       ✔      ✔
   Removed        .        ✔       ✘        .       ✘       ↻      ✔
   Killed         .        ✘       ✘        .       ✘       ✘      ↻
`

// TestUnitTableMatchesSeed1 compares each of the 49 cells. No call leads to Running, and the column Initiated is
// RunPodSandbox, which names no existing pod.
func TestUnitTableMatchesSeed1(t *testing.T) {
	call := map[State]Call{Created: CreateContainer, Starting: StartContainer, Stopped: StopContainer, Removed: RemoveContainer,
		Killed: StopPodSandbox}
	lines := strings.Split(strings.TrimSpace(seedTable), "\n")
	columns, cells := strings.Fields(lines[0]), 0
	for _, line := range lines[1:] {
		row := strings.Fields(line)
		for i, want := range row[1:] {
			cells++
			c, ordered := call[State(columns[i])]
			if !ordered || want == "." {
				continue
			}
			if row[0] == string(Killed) && c == RemoveContainer {
				want = "↻" // see unitTable
			}
			if got := string(Decide(true, State(row[0]), c)); got != want {
				t.Errorf("Decide(%s in %s) = %s, want %s", c, row[0], got, want)
			}
		}
	}
	if cells != 49 {
		t.Errorf("compared %d cells, want 49", cells)
	}
}

// TestEveryCellIsFilled: both tables have every state and call.
func TestEveryCellIsFilled(t *testing.T) {
	for _, unit := range []bool{true, false} {
		for _, s := range States {
			for _, c := range Calls {
				if Decide(unit, s, c) == 0 {
					t.Errorf("Decide(unit = %v, %s in %s) = 0, want a verdict", unit, c, s)
				}
			}
		}
	}
	if Decide(true, "", CreateContainer) == Valid {
		t.Error("CreateContainer for a pod that does not exist is valid")
	}
}

// TestDocumentedTable compares docs/states.md to the table; UPDATE=1 in the environment writes it.
func TestDocumentedTable(t *testing.T) {
	const path = "../../docs/states.md"
	want := "# The state tables\n\nPrinted from `internal/node/table.go`. ✔ valid, ↻ a repeat that changes nothing, ✘ FailedPrecondition, ⇒ a walk over valid edges.\n\n" + strings.TrimSpace(markdown()) + "\n"
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
		t.Errorf("%s differs from the table; run UPDATE=1 go test ./internal/node -run DocumentedTable", path)
	}
}

// unitNotes are what a kubelet needs beyond unitTable: no edges, but walks over its own and what lists show.
const unitNotes = `A kubelet restarts a container by creating its next attempt. Of a unit pod that is the walk Stopped → Removed → Created: a
CreateContainer in Stopped whose ` + "`metadata.attempt`" + ` is higher than the container's is valid, and so is one in Created, which
replaces the container. The same attempt in Stopped is refused, as the table says.

Each attempt has an ID of its own, and the unit's ID means the newest one. The attempt that ended stays in the record and in lists, as
Exited, with its reason, code and log path, until RemoveContainer of its own ID or the end of the pod; the 16 newest are kept. It cannot
be started again, and stopping it succeeds.

A kubelet's garbage collection removes containers before their sandbox. The container of a unit pod in Killed has ended with its
pod: RemoveContainer succeeds, lists and ContainerStatus then leave it out, and RemovePodSandbox removes it.

`

// markdown prints both tables for the documentation.
func markdown() string {
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
