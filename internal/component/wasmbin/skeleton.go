package wasmbin

import (
	"bytes"
	"encoding/binary"
)

// trap is the body of a function without locals that traps, with its length: unreachable, end (WebAssembly core
// specification, 5.4 and 5.5.13).
const trap = "\x03" + trapBody

// Skeleton returns a copy of a component whose core modules do nothing: every function traps, and there are no data and
// no custom sections. The types, imports and exports are the same, so an engine can tell the component's types at a
// fraction of the cost of compiling the component. It checks only what it rewrites.
func Skeleton(component []byte) ([]byte, error) {
	return skeleton(component, ComponentHeader, 0)
}

// skeleton rewrites a component or a core module, as its header must say.
func skeleton(b []byte, header string, depth int) ([]byte, error) {
	if !bytes.HasPrefix(b, []byte(header)) {
		return nil, damaged("a component or core module has another header than %q", header)
	}
	if depth > maxNesting {
		return nil, damaged("components nested more than %d deep", maxNesting)
	}
	module := header == ModuleHeader
	out := []byte(header)
	err := bodies(b, func(id byte, c *cursor) (err error) {
		body := c.rest
		switch {
		case module && (id == sectionCustom || id == moduleData || id == moduleCount):
			return nil
		case module && id == moduleCode:
			body, err = traps(c)
		case !module && id == 1: // a core module
			body, err = skeleton(c.rest, ModuleHeader, depth+1)
		case !module && id == 4: // a component
			body, err = skeleton(c.rest, ComponentHeader, depth+1)
		}
		out = appendSection(out, id, body)
		return err
	})
	return out, err
}

// traps returns a code section of as many functions as the given one.
func traps(c *cursor) ([]byte, error) {
	n := c.u32()
	if minSize := uint64(3); uint64(n)*minSize > uint64(len(c.rest)) { // a length, no locals, end
		return nil, damaged("%d functions in %d bytes", n, len(c.rest))
	}
	out := binary.AppendUvarint(nil, uint64(n))
	return append(out, bytes.Repeat([]byte(trap), int(n))...), nil
}
