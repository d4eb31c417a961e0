package wire

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
)

// ModuleData is the data of a module's create message, with each field verbatim. It is immutable: With and Without
// return copies.
type ModuleData map[string]json.RawMessage

// Restart policies in the field "restart".
const (
	RestartAlways    = "always"
	RestartOnFailure = "on-failure"
	RestartNever     = "never"
)

// ParseModuleData parses an object without checking its fields; see Validate.
func ParseModuleData(raw []byte) (ModuleData, error) {
	fields, err := ParseObject(raw)
	if err != nil {
		return nil, fmt.Errorf("module data: %w", err)
	}
	return fields, nil
}

// Bytes returns the encoded data: fields sorted by name, values verbatim.
func (d ModuleData) Bytes() json.RawMessage { return AppendObject(nil, d) }

// With returns a copy of the data in which the named field has the given value.
func (d ModuleData) With(name string, value any) (ModuleData, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("module data: %q: %w (%v)", name, errdefs.ErrInvalidArgument, err)
	}
	c := maps.Clone(d)
	if c == nil {
		c = ModuleData{}
	}
	c[name] = raw
	return c, nil
}

// Without returns a copy of the data without the named fields.
func (d ModuleData) Without(names ...string) ModuleData {
	c := maps.Clone(d)
	for _, name := range names {
		delete(c, name)
	}
	return c
}

// Kind returns what a request with the given action and these data is about: "module", "runtime", "manager", or "" if the
// type is missing. Some peers leave the type out when they delete a module.
func (d ModuleData) Kind(action string) string {
	if action == ActionDelete && isNull(d["type"]) && d.UUID() != "" {
		return "module"
	}
	return d.Text("type")
}

// UUID returns the uuid that identifies the module.
func (d ModuleData) UUID() string { return d.Text("uuid") }

// Name returns the module's name, which is for people and need not be unique.
func (d ModuleData) Name() string { return d.Text("name") }

// Parent returns the uuid or the name of the runtime, or "" if the orchestrator chooses.
func (d ModuleData) Parent() string { return d.Text("parent") }

// File returns the path of the program on the node, from "file" or "filename". A relative "file" is below the directory
// "location", which scene-scoped peers send.
func (d ModuleData) File() string {
	if f := d.Text("file"); f != "" {
		if path.IsAbs(f) {
			return f
		}
		return path.Join(d.Text("location"), f)
	}
	return d.Text("filename")
}

// FileType returns the type of the file, for example "WA" or "PY".
func (d ModuleData) FileType() string { return d.Text("filetype") }

// Image returns the reference of the OCI image that the module runs instead of a file. The reference has a digest.
func (d ModuleData) Image() string { return d.Text("image") }

// FaultCrash returns the policy after a crash: "ignore" or "restart".
func (d ModuleData) FaultCrash() string { return d.Text("fault_crash") }

// Restart returns the restart policy, by default RestartNever.
func (d ModuleData) Restart() string {
	if r := d.Text("restart"); r != "" {
		return r
	}
	return RestartNever
}

// Args returns the module's arguments, argv[0] first. If "args" is a list, it holds them. If "args" is an object, as from
// later peers, the field "argv" of that object holds the arguments without the program's name, which Args puts before
// them.
func (d ModuleData) Args() []string {
	o := d.argsObject()
	if o == nil {
		return d.list("args")
	}
	if isNull(o["argv"]) {
		return nil
	}
	return append([]string{d.program()}, o.list("argv")...)
}

// program returns the program's name: the last element of the file's path, or the module's name or uuid.
func (d ModuleData) program() string {
	if f := d.File(); f != "" {
		return path.Base(f)
	}
	return cmp.Or(d.Name(), d.UUID())
}

// Env returns the environment variables as NAME=value, from "env" and the "env" of "args".
func (d ModuleData) Env() []string { return append(d.list("env"), d.argsObject().list("env")...) }

// Dirs returns the node's directories that the module can use, from "dir" and "dirs", and from the same fields of
// "args".
func (d ModuleData) Dirs() []string {
	var all []string
	for _, o := range []ModuleData{d, d.argsObject()} {
		all = append(append(all, o.list("dir")...), o.list("dirs")...)
	}
	return all
}

// APIs returns the APIs that the module needs.
func (d ModuleData) APIs() []string { return d.list("apis") }

// Resources returns the limits as the client wrote them, or nil.
func (d ModuleData) Resources() ModuleData {
	var o ModuleData
	d.get("resources", &o)
	return o
}

// Channels returns the channels that the module can open, from "channels". A mode is text for channel.ParseFlags; flags
// can also be a number. A channel without a name is named after the topic's last level. If the field is invalid,
// Channels returns nil; see Validate.
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

// get decodes a field. It reports false if the field is missing or of the wrong kind.
func (d ModuleData) get(name string, to any) bool {
	raw := d[name]
	return !isNull(raw) && json.Unmarshal(raw, to) == nil
}

// Text returns a field's string, or "".
func (d ModuleData) Text(name string) string {
	var s string
	if !d.get(name, &s) {
		return ""
	}
	return s
}

// list returns a field's list of strings. A single string counts as a list.
func (d ModuleData) list(name string) []string {
	var all []string
	if d.get(name, &all) {
		return all
	}
	if s := d.Text(name); s != "" {
		return []string{s}
	}
	return nil
}
