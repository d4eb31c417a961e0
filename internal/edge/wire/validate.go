package wire

import (
	"encoding/json"
	"fmt"
	"path"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
)

// maxName bounds the length, in bytes, of uuids and names that become levels of topics.
const maxName = 256

// Validate checks the known fields. The error is errdefs.ErrInvalidArgument. Data with neither a file nor an image are
// valid, because a foreign runtime may have another field for the program.
func (d ModuleData) Validate() error {
	if err := ValidName("uuid", d.UUID()); err != nil {
		return err
	}
	for _, name := range []string{"uuid", "name", "parent", "file", "filename", "filetype", "image", "location", "scene", "fault_crash",
		"restart"} {
		var s string
		if raw := d[name]; !isNull(raw) && json.Unmarshal(raw, &s) != nil {
			return wrong(name, "a string")
		}
		if strings.ContainsRune(s, 0) {
			return wrong(name, "a string without NUL")
		}
	}
	switch d.Restart() {
	case RestartAlways, RestartOnFailure, RestartNever:
	default:
		return wrong("restart", "always, on-failure or never")
	}
	if raw := d["resources"]; !isNull(raw) && d.Resources() == nil {
		return wrong("resources", "an object")
	}
	return d.validLists()
}

func (d ModuleData) validLists() error {
	args := d.argsObject()
	lists := []struct {
		in   ModuleData
		name string
	}{{d, "env"}, {d, "dir"}, {d, "dirs"}, {d, "apis"}, {args, "argv"}, {args, "env"}, {args, "dir"}, {args, "dirs"}}
	if args == nil {
		lists = append(lists, lists[0])
		lists[len(lists)-1].name = "args"
	}
	for _, l := range lists {
		var all []string
		var one string
		if raw := l.in[l.name]; !isNull(raw) && json.Unmarshal(raw, &all) != nil && json.Unmarshal(raw, &one) != nil {
			return wrong(l.name, "a list of strings")
		}
		for _, s := range all {
			if strings.ContainsRune(s, 0) {
				return wrong(l.name, "strings without NUL")
			}
		}
	}
	_, err := d.channels()
	return err
}

// ValidName checks that a uuid can be a level of a topic and a file name. The error is errdefs.ErrInvalidArgument.
func ValidName(field, s string) error {
	switch {
	case s == "":
		return fmt.Errorf("module data: %q is missing: %w", field, errdefs.ErrInvalidArgument)
	case len(s) > maxName || s == "." || s == ".." || strings.ContainsAny(s, "/+#\x00") || strings.HasPrefix(s, "$") ||
		channel.ValidFilter(s) != nil:
		return fmt.Errorf("module data: %q is %q: it is part of topics, so it must have at most %d bytes and no / + # $: %w", field, s, maxName,
			errdefs.ErrInvalidArgument)
	}
	return nil
}

func wrong(name, want string) error {
	return fmt.Errorf("module data: %q is not %s: %w", name, want, errdefs.ErrInvalidArgument)
}

// channels reads the field "channels": [{"topic", "mode" or "flags", "qos", "name"}].
func (d ModuleData) channels() ([]channel.Channel, error) {
	raw := d["channels"]
	if isNull(raw) {
		return nil, nil
	}
	var list []struct {
		Name  string          `json:"name"`
		Topic string          `json:"topic"`
		Mode  string          `json:"mode"`
		Flags json.RawMessage `json:"flags"`
		QoS   *int            `json:"qos"`
	}
	if json.Unmarshal(raw, &list) != nil {
		return nil, wrong("channels", `a list of {"topic", "mode", "qos", "name"}`)
	}
	all := make([]channel.Channel, 0, len(list))
	for i, c := range list {
		mode := c.Mode
		if mode == "" {
			mode = "rw"
		}
		flags, err := channel.ParseFlags(mode)
		if !isNull(c.Flags) {
			flags, err = parseFlagsField(c.Flags)
		}
		if err == nil && c.QoS != nil {
			flags, err = withQoS(flags, *c.QoS)
		}
		if err == nil {
			err = channel.Open{FD: i, Flags: flags, Topic: c.Topic}.Validate()
		}
		if err != nil {
			return nil, fmt.Errorf("module data: channel %d of the list: %w", i, err)
		}
		if c.Name == "" {
			c.Name = path.Base(c.Topic)
		}
		all = append(all, channel.Channel{Name: c.Name, Topic: c.Topic, Flags: flags})
	}
	return all, nil
}

// parseFlagsField parses flags from a number or a mode (channel.ParseFlags).
func parseFlagsField(raw json.RawMessage) (channel.Flags, error) {
	var n uint8
	if json.Unmarshal(raw, &n) == nil {
		if n &= uint8(channel.ReadWrite | channel.QoS1 | channel.QoS2); n != 0 {
			return channel.Flags(n), nil
		}
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return channel.ParseFlags(s)
	}
	return 0, wrong("flags", "a number or a mode")
}

func withQoS(f channel.Flags, qos int) (channel.Flags, error) {
	if qos < 0 || qos > 2 {
		return 0, wrong("qos", "0, 1 or 2")
	}
	return f&channel.ReadWrite | []channel.Flags{0, channel.QoS1, channel.QoS2}[qos], nil
}
