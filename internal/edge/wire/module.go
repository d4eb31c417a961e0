package wire

import (
	"encoding/json"
	"fmt"
	"maps"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
)

// ModuleData is the data of a module's create message, each field verbatim. It is immutable: With and Without return copies.
type ModuleData map[string]json.RawMessage

// Restart policies, the field "restart".
const (
	RestartAlways    = "always"
	RestartOnFailure = "on-failure"
	RestartNever     = "never"
)

// ParseModuleData reads an object without checking its fields; see Validate.
func ParseModuleData(raw []byte) (ModuleData, error) {
	fields, err := ParseObject(raw)
	if err != nil {
		return nil, fmt.Errorf("a module's data: %w", err)
	}
	return fields, nil
}

// Bytes is the encoded data: fields by name, values verbatim.
func (d ModuleData) Bytes() json.RawMessage { return AppendObject(nil, d) }

// With is a copy of the data with the field set.
func (d ModuleData) With(name string, value any) (ModuleData, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("a module's %q: %w (%v)", name, errdefs.ErrInvalidArgument, err)
	}
	c := maps.Clone(d)
	if c == nil {
		c = ModuleData{}
	}
	c[name] = raw
	return c, nil
}

// Without is a copy of the data without the fields.
func (d ModuleData) Without(names ...string) ModuleData {
	c := maps.Clone(d)
	for _, name := range names {
		delete(c, name)
	}
	return c
}

// UUID names the module.
func (d ModuleData) UUID() string { return d.text("uuid") }

// Name is for people.
func (d ModuleData) Name() string { return d.text("name") }

// Parent is the uuid or the name of the runtime; "" if the orchestrator chooses.
func (d ModuleData) Parent() string { return d.text("parent") }

// File is the path of the program on the node: "file" or "filename".
func (d ModuleData) File() string {
	if f := d.text("file"); f != "" {
		return f
	}
	return d.text("filename")
}

// FileType is the kind of the file, as "WA" or "PY".
func (d ModuleData) FileType() string { return d.text("filetype") }

// Image is an OCI reference with a digest, instead of a file.
func (d ModuleData) Image() string { return d.text("image") }

// FaultCrash is the policy after a crash: "ignore" or "restart".
func (d ModuleData) FaultCrash() string { return d.text("fault_crash") }

// Restart is the restart policy; RestartNever by default.
func (d ModuleData) Restart() string {
	if r := d.text("restart"); r != "" {
		return r
	}
	return RestartNever
}

// Args are the module's arguments, argv[0] first: "args" as a list, or its "argv" if it is an object.
func (d ModuleData) Args() []string {
	if o := d.argsObject(); o != nil {
		return o.list("argv")
	}
	return d.list("args")
}

// Env are the variables, NAME=value: the module's own and those of its arguments.
func (d ModuleData) Env() []string { return append(d.list("env"), d.argsObject().list("env")...) }

// Dirs are the directories of the node that the module sees: "dir" and "dirs", and those of its arguments.
func (d ModuleData) Dirs() []string {
	var all []string
	for _, o := range []ModuleData{d, d.argsObject()} {
		all = append(append(all, o.list("dir")...), o.list("dirs")...)
	}
	return all
}

// APIs are the APIs that the module needs.
func (d ModuleData) APIs() []string { return d.list("apis") }

// Resources are the limits as the client wrote them; nil if there are none.
func (d ModuleData) Resources() ModuleData {
	var o ModuleData
	d.get("resources", &o)
	return o
}

// Channels are the channels that the module may open, from "channels": the mode is in the words of channel.ParseFlags, or the
// number of the flags; a name that is missing is the topic's last level.
func (d ModuleData) Channels() []channel.Channel {
	all, err := d.channels()
	if err != nil {
		return nil
	}
	return all
}

func (d ModuleData) argsObject() ModuleData {
	var o ModuleData
	d.get("args", &o)
	return o
}

// get decodes a field; false if it is missing or of the wrong kind.
func (d ModuleData) get(name string, to any) bool {
	raw := d[name]
	return !isNull(raw) && json.Unmarshal(raw, to) == nil
}

func (d ModuleData) text(name string) string {
	var s string
	if !d.get(name, &s) {
		return ""
	}
	return s
}

// list is a list of strings, or a string alone.
func (d ModuleData) list(name string) []string {
	var all []string
	if d.get(name, &all) {
		return all
	}
	if s := d.text(name); s != "" {
		return []string{s}
	}
	return nil
}
