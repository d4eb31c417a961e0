package wasmbin

import "slices"

const (
	// mergeGap is the largest number of zeros, in bytes, that MergeData puts between two segments. Go's linker leaves out runs
	// of zeros, which makes 100 000 segments of a large program, the most that a module may have; with this gap 33 remain, and
	// the module grows by 4.5 %.
	mergeGap = 64
	// maxSegments is how many segments a module may have (an engine's limit).
	maxSegments = 100_000
)

// MergeData joins neighbouring data segments of a module, because each of them takes 12 bytes, and the time to write them, in
// every instance. The memory begins with the same content. It leaves the module as it is if its code can refer to segments, if
// their places depend on anything, if they are not valid in every respect that it reads, or if there is nothing to join.
func (m *Module) MergeData() {
	data, ok := mergeable(m.Code)
	if !ok {
		return
	}
	joined := joinData(data)
	if len(joined) == len(data) {
		return
	}
	out := make([]byte, 0, len(m.Code))
	out = append(out, ModuleHeader...)
	_ = bodies(m.Code, func(id byte, c *cursor) error { // mergeable has read it
		if id == moduleData {
			out = appendData(out, joined)
		} else {
			out = appendSection(out, id, c.rest)
		}
		return nil
	})
	m.Code, m.Segments = out, uint32(len(joined))
}

// mergeable returns the data segments of a module, if they can be joined: all of them are active, at constant and ascending
// places of the only memory, which is the module's own, and no code can refer to them.
func mergeable(module []byte) (data []Data, ok bool) {
	var own, imported int
	counted, places, end := false, true, uint64(0)
	err := bodies(module, func(id byte, c *cursor) error {
		switch id {
		case moduleImports:
			c.each(func() {
				if c.moduleImport().Kind == Memory {
					imported++
				}
			})
		case moduleMemories:
			c.each(func() { c.limits(); own++ })
		case moduleCount:
			counted = true
		case moduleData:
			places = places && len(data) == 0
			c.each(func() {
				if c.u8() != 0 || c.u8() != opI32Const || len(data) == maxSegments {
					places = false
				}
				before := len(c.rest)
				offset := c.signed()
				places = places && offset == int64(int32(offset)) && before-len(c.rest) <= maxLEB && c.u8() == opEnd
				if !places { // the rest may be of another kind
					c.rest = nil
					return
				}
				d := Data{Offset: uint32(offset)}
				d.Bytes = c.take(c.u32())
				places = uint64(d.Offset) >= end
				end = d.end()
				data = append(data, d)
			})
			places = places && len(c.rest) == 0
		}
		return nil
	})
	return data, err == nil && own == 1 && imported == 0 && !counted && places
}

// joinData joins segments between which there are at most mergeGap bytes.
func joinData(data []Data) (joined []Data) {
	for len(data) > 0 {
		n, size := 1, len(data[0].Bytes)
		for n < len(data) && uint64(data[n].Offset)-data[n-1].end() <= mergeGap {
			size = int(data[n].end() - uint64(data[0].Offset))
			n++
		}
		run := data[0].Bytes
		if n > 1 {
			run = slices.Grow([]byte(nil), size)
			for _, d := range data[:n] {
				run = append(run, make([]byte, uint64(d.Offset)-uint64(data[0].Offset)-uint64(len(run)))...)
				run = append(run, d.Bytes...)
			}
		}
		joined = append(joined, Data{data[0].Offset, run})
		data = data[n:]
	}
	return joined
}
