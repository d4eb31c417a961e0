package wasmbin

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// Max is the maximum size of a section with names, in bytes. For custom sections, the caller of Custom sets the limit.
const Max = 4 << 20

// Outline is a summary of a binary.
type Outline struct {
	// Component is true for a component, false for a core module.
	Component bool
	// Imports are the names that a component imports. For a core module, each import has the form "MODULE NAME".
	// Exports are names only. Both lists are in the order of the file.
	Imports, Exports []string
	// Custom are the names of the custom sections.
	Custom []string
}

// HasExport reports whether the binary has an export of that name.
func (o *Outline) HasExport(name string) bool { return slices.Contains(o.Exports, name) }

// CheckWASI returns errdefs.ErrInvalidArgument if a component imports or exports an interface of WASI 0.3, whose asynchronous
// functions are another component model than that of 0.2.
func (o *Outline) CheckWASI() error {
	for _, name := range slices.Concat(o.Exports, o.Imports) {
		if strings.HasPrefix(name, "wasi:") && strings.Contains(name, "@0.3.") {
			return fmt.Errorf("the component is of WASI 0.3 (%s), which Tripod does not run; build it for WASI 0.2: %w", name,
				errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// Section numbers.
const (
	sectionCustom = 0

	moduleTypes     = 1
	moduleImports   = 2
	moduleFunctions = 3
	moduleTables    = 4
	moduleMemories  = 5
	moduleGlobals   = 6
	moduleExports   = 7
	moduleStart     = 8
	moduleElements  = 9
	moduleCode      = 10
	moduleData      = 11
	moduleCount     = 12 // of the data segments

	componentImports = 10
	componentExports = 11
)

// Read reads the outline of a binary of the given size in bytes. It returns an error for a truncated binary.
func Read(r io.ReaderAt, size int64) (*Outline, error) {
	o := &Outline{}
	var err error
	if o.Component, err = preamble(r, size); err != nil {
		return nil, err
	}
	err = sections(r, size, func(s section) error { return o.section(r, s) })
	if err != nil {
		return nil, err
	}
	return o, nil
}

// Custom returns the content of the first custom section with the given name, or nil if there is none. If the content
// is larger than limit bytes, it returns an error.
func Custom(r io.ReaderAt, size int64, name string, limit int64) ([]byte, error) {
	if _, err := preamble(r, size); err != nil {
		return nil, err
	}
	var found []byte
	err := sections(r, size, func(s section) error {
		if s.id != sectionCustom || found != nil {
			return nil
		}
		// Read only the name at first, because debug information of any size can follow the name.
		head, err := s.read(r, min(s.size, int64(len(name))+maxLEB))
		if err != nil {
			return err
		}
		if got, _, ok := cutName(head); !ok || got != name {
			return nil
		}
		if s.size > limit {
			return invalid(s.offset, "the custom section %q has %d bytes, more than the limit of %d", name, s.size, limit)
		}
		content, err := s.read(r, s.size)
		if err != nil {
			return err
		}
		_, found, _ = cutName(content)
		return nil
	})
	return found, err
}

// preamble reports whether a binary is a component or a core module. It returns an error for anything else.
func preamble(r io.ReaderAt, size int64) (component bool, err error) {
	var head [8]byte
	n, err := r.ReadAt(head[:min(size, 8)], 0)
	if err != nil && n < int(min(size, 8)) {
		return false, err
	}
	if n < len(head) || string(head[:4]) != "\x00asm" {
		return false, invalid(0, "not WebAssembly: the file begins with %q", head[:n])
	}
	switch version, layer := binary.LittleEndian.Uint16(head[4:]), binary.LittleEndian.Uint16(head[6:]); {
	case version == 1 && layer == 0:
		return false, nil
	case version == 13 && layer == 1:
		return true, nil
	default:
		return false, invalid(4, "WebAssembly version %d, layer %d: only modules (1, 0) and components (13, 1) are supported", version, layer)
	}
}

// section is the position of a section's content in the file.
type section struct {
	id           byte
	offset, size int64
}

func (s section) read(r io.ReaderAt, n int64) ([]byte, error) {
	data := make([]byte, n)
	if got, err := r.ReadAt(data, s.offset); int64(got) < n {
		return nil, fmt.Errorf("read section %d at %#x: %w", s.id, s.offset, err)
	}
	return data, nil
}

// sections calls the given function for each top-level section of the file.
func sections(r io.ReaderAt, size int64, do func(section) error) error {
	for at := int64(8); at < size; {
		head := make([]byte, min(size-at, 1+maxLEB))
		if n, err := r.ReadAt(head, at); n < len(head) {
			return err
		}
		c := &cursor{rest: head[1:]}
		length := c.u32()
		if c.err != nil {
			return invalid(at, "section %d has no length: the file is cut off or not WebAssembly", head[0])
		}
		s := section{id: head[0], offset: at + int64(len(head)-len(c.rest)), size: int64(length)}
		if s.size > size-s.offset {
			return invalid(at, "section %d has %d bytes, but the file ends after %d of them: it is cut off", s.id, s.size, size-s.offset)
		}
		if err := do(s); err != nil {
			return err
		}
		at = s.offset + s.size
	}
	return nil
}

// bodies calls the given function with the content of each section of a binary in memory.
func bodies(b []byte, do func(id byte, body *cursor) error) error {
	return sections(bytes.NewReader(b), int64(len(b)), func(s section) error {
		end := s.offset + s.size
		body := &cursor{rest: b[s.offset:end:end]}
		if err := do(s.id, body); err != nil {
			return err
		}
		if body.err != nil {
			return invalid(s.offset, "section %d cannot be read: %v", s.id, body.err)
		}
		return nil
	})
}

// section adds the names in a section to the outline.
func (o *Outline) section(r io.ReaderAt, s section) error {
	var names func(*cursor)
	switch {
	case s.id == sectionCustom:
		head, err := s.read(r, min(s.size, 4<<10))
		if err != nil {
			return err
		}
		if name, _, ok := cutName(head); ok {
			o.Custom = append(o.Custom, name)
		}
		return nil
	case o.Component && s.id == componentImports:
		names = o.componentImport
	case o.Component && s.id == componentExports:
		names = o.componentExport
	case !o.Component && s.id == moduleImports:
		names = o.moduleImport
	case !o.Component && s.id == moduleExports:
		names = o.moduleExport
	default:
		return nil
	}
	if s.size > Max {
		return invalid(s.offset, "section %d has %d bytes, more than the limit of %d", s.id, s.size, Max)
	}
	content, err := s.read(r, s.size)
	if err != nil {
		return err
	}
	c := &cursor{rest: content}
	c.each(func() { names(c) })
	if c.err != nil {
		return invalid(s.offset, "section %d cannot be read: %v", s.id, c.err)
	}
	return nil
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("damaged WebAssembly: "+format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

func invalid(offset int64, format string, args ...any) error {
	return fmt.Errorf("at %#x: %s: %w", offset, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}
