package wasmbin

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

const (
	// MemoryExport is the only export of a module that has a memory and its data alone.
	MemoryExport = "memory"
	// GlobalExport and TableExport, followed by the index among the mutable globals or the tables (from 0), name the
	// exports that show a module's state.
	GlobalExport = "tripod:global/"
	TableExport  = "tripod:table/"
)

// Detached is a core module whose memory begins empty: the host fills it, each time with other data if it wants to. The code
// is compiled once.
type Detached struct {
	// Code is the module; all indices stay. It also exports its mutable globals and its tables (GlobalExport, TableExport),
	// whose numbers are Globals and Tables. It has data segments only if its code can refer to them, because each takes time in
	// each instance, and Go's linker makes 100 000 of them.
	Code            []byte
	Globals, Tables int
	// Memory is a core module that exports the memory with the data that the original module begins with.
	Memory []byte
}

// Data are bytes in a memory, at an offset.
type Data struct {
	Offset uint32
	Bytes  []byte
}

func (d Data) end() uint64 { return uint64(d.Offset) + uint64(len(d.Bytes)) }

// Detach separates a core module from its memory. If that is impossible, it returns nil and the reason. A module that
// cannot be read is an error.
func Detach(module []byte) (d *Detached, reason string, err error) {
	var s state
	if err := bodies(module, s.read); err != nil {
		return nil, "", err
	}
	switch {
	case s.reason != "":
		return nil, s.reason, nil
	case len(s.memories) != 1:
		return nil, fmt.Sprintf("it defines %d memories", len(s.memories)), nil
	case !s.exports:
		return nil, "it has no exports", nil
	}
	if reason := tooSparse(s.data); reason != "" {
		return nil, reason, nil
	}
	memory := s.memories[0]
	d = &Detached{Globals: len(s.globals), Tables: s.tables, Memory: memoryModule(memory.min, memory.max, s.data)}
	d.Code = []byte(ModuleHeader)
	err = bodies(module, func(id byte, c *cursor) error {
		if id != moduleData || s.counted {
			d.Code = appendSection(d.Code, id, s.rewrite(id, c))
		}
		return nil
	})
	return d, "", err
}

const (
	// maxDetached bounds the pages with data of a detached memory, in bytes. The host keeps them beside the instances.
	maxDetached = 64 << 20
	// maxSparse is the largest distance, in bytes, from the first to the last page with data, if less than half of the pages
	// between them have data. All of them take memory once guests have read them.
	maxSparse = 16 << 20
	pageBytes = 4096
)

// tooSparse returns why a memory with the given data cannot be kept as an image, or "".
func tooSparse(data []Data) string {
	var pages, first, last, size uint64
	sorted := slices.SortedFunc(slices.Values(data), func(a, b Data) int { return cmp.Compare(a.Offset, b.Offset) })
	for _, d := range sorted {
		from, to := uint64(d.Offset)/pageBytes, (d.end()+pageBytes-1)/pageBytes
		if pages == 0 {
			first, last = from, from
		}
		if from = max(from, last); to > from { // the part that no segment before has
			pages += to - from
			last = to
		}
	}
	if size = pages * pageBytes; size > maxDetached || (last-first)*pageBytes > maxSparse && pages < (last-first)/2 {
		return fmt.Sprintf("it begins with %d bytes of data within %d bytes", size, (last-first)*pageBytes)
	}
	return ""
}

// memoryModule returns a core module that exports a memory as MemoryExport, with data. The sizes count pages; max is 0 if
// there is none.
func memoryModule(min, max uint64, data []Data) []byte {
	out := appendSection([]byte(ModuleHeader), moduleMemories, append([]byte{1}, memoryType(min, max)...))
	out = appendSection(out, moduleExports, append(appendName([]byte{1}, MemoryExport), byte(Memory), 0))
	return appendData(out, data)
}

// appendData appends a data section with active segments of memory 0.
func appendData(out []byte, data []Data) []byte {
	heads, count := make([][]byte, len(data)), binary.AppendUvarint(nil, uint64(len(data)))
	size := len(count)
	for k, d := range data {
		head := append(appendSigned([]byte{0, opI32Const}, int64(int32(d.Offset))), opEnd)
		heads[k] = binary.AppendUvarint(head, uint64(len(d.Bytes)))
		size += len(heads[k]) + len(d.Bytes)
	}
	out = slices.Grow(out, 1+maxLEB+size) // the data can be large, so it is copied once
	out = append(binary.AppendUvarint(append(out, moduleData), uint64(size)), count...)
	for k, d := range data {
		out = append(append(out, heads[k]...), d.Bytes...)
	}
	return out
}

// memoryType encodes the type of a memory (5.3.9): a flag whether there is a maximum, and the sizes in pages.
func memoryType(min, max uint64) []byte {
	if max == 0 {
		return binary.AppendUvarint([]byte{0}, min)
	}
	return binary.AppendUvarint(binary.AppendUvarint([]byte{1}, min), max)
}

// state is what Detach must know of a module before it copies the module.
type state struct {
	reason   string // why the module cannot be detached
	exports  bool
	memories []struct{ min, max uint64 }
	globals  []uint32 // the mutable ones
	defined  uint32   // number of globals
	tables   int
	data     []Data
	segments bool // there is a data section
	counted  bool // a section counts the data segments: without it, no code can refer to them (5.5.15)
}

// refuse records why the module cannot be detached, unless what it is based on could not be read.
func (s *state) refuse(c *cursor, format string, args ...any) {
	if s.reason == "" && c.err == nil {
		s.reason = fmt.Sprintf(format, args...)
	}
}

// read reads one section.
func (s *state) read(id byte, c *cursor) error {
	switch id {
	case moduleImports:
		c.each(func() {
			if i := c.moduleImport(); i.Kind != Func {
				s.refuse(c, "it imports %s.%s, which is not a function", i.Module, i.Name)
			}
		})
	case moduleTables:
		var m Module
		c.each(func() {
			if len(c.rest) > 0 && c.rest[0] != typeFuncref {
				s.refuse(c, "it has a table of other values than functions")
			}
			m.table(c)
		})
		s.tables = len(m.Tables)
	case moduleMemories:
		c.each(func() { s.memory(c) })
	case moduleGlobals:
		c.each(func() { s.global(c) })
	case moduleExports:
		s.exports = true
		c.each(func() {
			if name, _ := c.moduleExport(); strings.HasPrefix(name, GlobalExport) || strings.HasPrefix(name, TableExport) {
				s.refuse(c, "it exports %s", name)
			}
		})
	case moduleStart:
		s.refuse(c, "it has a start function")
	case moduleCount:
		s.counted = true
	case moduleData: // checked in full, because the engine may not see it
		if s.segments {
			c.fail("a second data section")
		}
		s.segments = true
		c.each(func() {
			if d := s.segment(c); d.active {
				s.data = append(s.data, d.Data)
			}
		})
		if len(c.rest) > 0 {
			c.fail("%d bytes after the last data segment", len(c.rest))
		}
	}
	if s.reason != "" {
		c.err = nil // what refuse has found can also make the rest of the section unreadable
	}
	return nil
}

func (s *state) memory(c *cursor) {
	flags := c.u8()
	m := struct{ min, max uint64 }{min: c.leb(64)}
	if flags&1 != 0 {
		if m.max = c.leb(64); m.max == 0 {
			s.refuse(c, "its memory is empty")
		}
	}
	if flags&^1 != 0 {
		s.refuse(c, "its memory has the flags %#x", flags)
	}
	s.memories = append(s.memories, m)
}

// global reads a global: its type, whether it is mutable, and its initial value.
func (s *state) global(c *cursor) {
	kind := c.u8()
	if kind == 0x63 || kind == 0x64 { // a heap type follows
		c.leb(33)
	}
	if mutable := c.u8(); mutable == 1 {
		if kind < typeF64 || kind > typeI32 {
			s.refuse(c, "it has a mutable global that is not a number")
		}
		s.globals = append(s.globals, s.defined)
	}
	s.defined++
	s.constant(c)
}

// segmentData is a data segment. A passive one is copied by an instruction of the module.
type segmentData struct {
	Data
	active bool
}

func (s *state) segment(c *cursor) segmentData {
	var d segmentData
	flags := c.u8()
	if flags == 2 {
		c.u32() // the memory
	}
	if d.active = flags != 1; d.active {
		offset, ok := s.constant(c)
		if !ok {
			s.refuse(c, "the offset of its data is not a constant")
		}
		d.Offset = uint32(offset)
	}
	d.Bytes = c.take(c.u32())
	return d
}

// constant reads a constant expression (3.3.13). It returns the value of a single i32.const.
func (s *state) constant(c *cursor) (value int32, ok bool) {
	for n := 0; c.err == nil; n++ {
		switch op := c.u8(); op {
		case opEnd:
			return value, ok && n == 1
		case opI32Const:
			value, ok = int32(c.signed()), true
		case opI64Const:
			c.signed()
		case opF32Const:
			c.take(4)
		case opF64Const:
			c.take(8)
		case opGlobalGet, opRefFunc:
			c.u32()
		case opRefNull:
			c.leb(33)
		case opVector:
			if c.u32() != opV128Const {
				s.refuse(c, "it has a constant expression with a vector instruction")
				return 0, false
			}
			c.take(16)
		default:
			s.refuse(c, "it has a constant expression with the instruction %#x", op)
			return 0, false
		}
		ok = ok && n == 0
	}
	return 0, false
}

// rewrite returns the content of a section of the detached module.
func (s *state) rewrite(id byte, c *cursor) []byte {
	body := c.rest
	switch id {
	case moduleExports:
		n := c.u32()
		out := append(binary.AppendUvarint(nil, uint64(n)+uint64(len(s.globals)+s.tables)), c.rest...)
		for k, index := range s.globals {
			out = append(appendName(out, fmt.Sprint(GlobalExport, k)), byte(Global))
			out = binary.AppendUvarint(out, uint64(index))
		}
		for k := range s.tables {
			out = append(appendName(out, fmt.Sprint(TableExport, k)), byte(Table))
			out = binary.AppendUvarint(out, uint64(k))
		}
		return out
	case moduleData:
		out := binary.AppendUvarint(nil, uint64(c.u32()))
		for len(c.rest) > 0 && c.err == nil {
			d := s.segment(c)
			if d.active {
				d.Bytes = nil // as after instantiation: an active segment is dropped then
			}
			out = append(binary.AppendUvarint(append(out, 1), uint64(len(d.Bytes))), d.Bytes...)
		}
		return out
	}
	return body
}

func appendSection(out []byte, id byte, body []byte) []byte {
	return append(binary.AppendUvarint(append(out, id), uint64(len(body))), body...)
}

func appendName(out []byte, name string) []byte {
	return append(binary.AppendUvarint(out, uint64(len(name))), name...)
}

// appendSigned appends a number in signed LEB128 (5.2.2).
func appendSigned(out []byte, n int64) []byte {
	for {
		b := byte(n & 0x7f)
		if n >>= 7; n == 0 && b&0x40 == 0 || n == -1 && b&0x40 != 0 {
			return append(out, b)
		}
		out = append(out, b|0x80)
	}
}

// signed reads a number in signed LEB128.
func (c *cursor) signed() (v int64) {
	for shift := 0; ; {
		b := c.u8()
		if c.err != nil {
			return 0
		}
		if shift > 63 {
			c.fail("a number of more than 64 bits")
			return 0
		}
		v |= int64(b&0x7f) << shift
		if shift += 7; b < 0x80 {
			if shift < 64 && b&0x40 != 0 {
				v |= -1 << shift
			}
			return v
		}
	}
}
