package health

import "encoding/json"

// Finding is the result of one check.
type Finding struct {
	// Subject names what was checked: "overlayfs", "CNI plugins" …
	Subject string
	// OK means that the check passed. Required means that pods cannot run if the check fails.
	OK, Required bool
	// Detail describes the result. Remedy says what to do if OK is false.
	Detail, Remedy string
}

// Level returns the severity of a finding: "ok", "note" or "error".
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

// MarshalJSON adds the level.
func (f Finding) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{
		"subject": f.Subject, "level": f.Level(), "ok": f.OK, "required": f.Required, "detail": f.Detail, "remedy": f.Remedy,
	})
}
