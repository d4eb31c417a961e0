package check

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Finding is one thing that was looked at.
type Finding struct {
	// Subject names it: "overlayfs", "CNI plugins" …
	Subject string
	// OK says that it is as it should be; Required, that pods cannot run when it is not.
	OK, Required bool
	// Detail tells what was found, Remedy what to do when it is not OK.
	Detail, Remedy string
}

// Level is how much a finding matters: "ok", "note" or "error".
func (f Finding) Level() string {
	switch {
	case f.OK:
		return "ok"
	case f.Required:
		return "error"
	default:
		return "note"
	}
}

// MarshalJSON gives the finding with its level.
func (f Finding) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{
		"subject": f.Subject, "level": f.Level(), "ok": f.OK, "required": f.Required, "detail": f.Detail, "remedy": f.Remedy,
	})
}

// Errors counts the findings without which pods cannot run.
func Errors(findings []Finding) int {
	n := 0
	for _, f := range findings {
		if f.Level() == "error" {
			n++
		}
	}
	return n
}

// Print writes the findings for a person, each with its remedy, and a summary.
func Print(out io.Writer, findings []Finding) error {
	width, notes := 0, 0
	for _, f := range findings {
		width = max(width, len(f.Subject))
		if f.Level() == "note" {
			notes++
		}
	}
	for _, f := range findings {
		if _, err := fmt.Fprintf(out, "%-5s  %-*s  %s\n", f.Level(), width, f.Subject, oneLine(f.Detail)); err != nil {
			return err
		}
		if !f.OK && f.Remedy != "" {
			if _, err := fmt.Fprintf(out, "%-5s  %-*s  → %s\n", "", width, "", oneLine(f.Remedy)); err != nil {
				return err
			}
		}
	}
	summary := "This host can run pods"
	if n := Errors(findings); n > 0 {
		summary = fmt.Sprintf("This host cannot run pods yet: %d of %d findings are errors", n, len(findings))
	}
	_, err := fmt.Fprintf(out, "\n%s (%d notes).\n", summary, notes)
	return err
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
