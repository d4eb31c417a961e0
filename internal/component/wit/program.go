package wit

import "encoding/binary"

// ProgramMagic is the first word of [Program]: "TVP1" read as a little-endian u32.
const ProgramMagic = 0x31505654

// NoNode marks a missing type.
const NoNode = 0xffffffff

// Program encodes the types of a function as a table for the C half of the engine. All words are u32, little-endian,
// and indices start at 0.
//
//	header   magic, total bytes, nodes, children, cores bytes, names bytes, params, result node (or NoNode)
//	params   params x { node }
//	nodes    nodes x 10 words:
//	           0 kind            number of Kind
//	           1 name            offset in names (named types and resources; otherwise the empty name)
//	           2 first child     index in children
//	           3 child count     record, tuple: fields; variant, enum, option, result: cases; list: 1; flags: flags
//	           4 size            in linear memory
//	           5 align
//	           6 discriminant    bytes of the discriminant (1, 2 or 4); 0 if the kind has none
//	           7 payload         offset of the payload; 0 if the kind has none
//	           8 first core      index in cores of the flattened types
//	           9 core count      number of core values; NoNode if there are more than MaxFlat
//	children children x 3 words:
//	           0 node            NoNode for a case without payload, or a flag
//	           1 offset          record, tuple: the field's offset in memory; otherwise 0
//	           2 name            offset in names (option and result: "none", "some", "ok", "error"; tuple, list: empty)
//	cores    one byte for each core value (CoreType), padded with zeros to a multiple of 4
//	names    NUL-terminated; offset 0 is the empty name
//
// A node comes after all nodes that it refers to. A variant's payload can be smaller than the space that the layout
// reserves for it.
func Program(params []*Type, result *Type) []byte {
	b := &programBuilder{
		index: make(map[*Type]uint32), layouts: make(layouts), flat: make(flattened),
		names: []byte{0}, nameAt: map[string]uint32{"": 0},
	}
	roots := make([]uint32, len(params))
	for i, p := range params {
		roots[i] = b.node(p)
	}
	res := b.node(result)
	for len(b.cores)%4 != 0 {
		b.cores = append(b.cores, 0)
	}

	words := []uint32{
		ProgramMagic, 0, uint32(len(b.nodes) / nodeWords), uint32(len(b.children) / childWords),
		uint32(len(b.cores)), uint32(len(b.names)), uint32(len(params)), res,
	}
	words = append(words, roots...)
	words = append(words, b.nodes...)
	words = append(words, b.children...)
	words[1] = uint32(4*len(words) + len(b.cores) + len(b.names))

	out := make([]byte, 0, words[1])
	for _, w := range words {
		out = binary.LittleEndian.AppendUint32(out, w)
	}
	out = append(out, b.cores...)
	return append(out, b.names...)
}

const (
	nodeWords  = 10
	childWords = 3
)

type programBuilder struct {
	index    map[*Type]uint32
	layouts  layouts
	flat     flattened
	nodes    []uint32
	children []uint32
	cores    []byte
	names    []byte
	nameAt   map[string]uint32
}

type programChild struct {
	typ    *Type
	offset uint32
	name   string
}

func (b *programBuilder) node(t *Type) uint32 {
	if t == nil {
		return NoNode
	}
	if i, ok := b.index[t]; ok {
		return i
	}
	children := b.parts(t)
	entries := make([]uint32, 0, childWords*len(children))
	for _, c := range children {
		entries = append(entries, b.node(c.typ), c.offset, b.name(c.name))
	}
	first := uint32(len(b.children) / childWords)
	b.children = append(b.children, entries...)

	size, align := b.layouts.of(t)
	var discriminant, payload uint32
	if t.Payloads() != nil {
		discriminant, payload = b.layouts.payload(t)
	}
	core, count := uint32(len(b.cores)), uint32(NoNode)
	if flat, ok := b.flat.of(t); ok {
		count = uint32(len(flat))
		for _, c := range flat {
			b.cores = append(b.cores, byte(c))
		}
	}
	i := uint32(len(b.nodes) / nodeWords)
	b.index[t] = i
	b.nodes = append(b.nodes, uint32(t.Kind), b.name(t.Name), first, uint32(len(children)),
		size, align, discriminant, payload, core, count)
	return i
}

func (b *programBuilder) parts(t *Type) []programChild {
	var all []programChild
	switch t.Kind {
	case List:
		all = append(all, programChild{typ: t.Elem})
	case Option:
		all = append(all, programChild{name: "none"}, programChild{typ: t.Elem, name: "some"})
	case Result:
		all = append(all, programChild{typ: t.Ok, name: "ok"}, programChild{typ: t.Err, name: "error"})
	case Record, Tuple:
		for i, offset := range b.layouts.offsets(t) {
			all = append(all, programChild{t.Fields[i].Type, offset, t.Fields[i].Name})
		}
	case Variant, Enum, Flags:
		for _, c := range t.Cases {
			all = append(all, programChild{typ: c.Type, name: c.Name})
		}
	}
	return all
}

func (b *programBuilder) name(s string) uint32 {
	at, ok := b.nameAt[s]
	if !ok {
		at = uint32(len(b.names))
		b.nameAt[s] = at
		b.names = append(append(b.names, s...), 0)
	}
	return at
}
