package wasmbin

import "slices"

// mergeGap is the largest number of zeros, in bytes, that MergeData puts between two segments. Go's linker leaves out runs of
// zeros, which makes 100 000 segments of a large program, the most that a module may have; with this gap 33 remain, and the
// module grows by 4.5 %.
const mergeGap = 64

// MergeData joins neighbouring data segments of a core module, because each of them takes 12 bytes, and the time to write
// them, in every instance. The memory begins with the same content. It returns the module itself if its code can refer to
// segments, if their places depend on anything, or if there is nothing to join.
func MergeData(module []byte) []byte {
	var own, imported int
	counted, places := false, true
	var data []Data
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
			var s state
			end := uint64(0)
			c.each(func() {
				d := s.segment(c)
				places = places && s.reason == "" && d.active && uint64(d.Offset) >= end
				end = d.end()
				data = append(data, d.Data)
			})
			places = places && len(c.rest) == 0
		}
		return nil
	})
	if err != nil || own != 1 || imported > 0 || counted || !places {
		return module
	}
	var joined []Data
	for n := 0; n < len(data); {
		first, end := data[n], uint64(0)
		run := first.Bytes // of the segments that become one
		for end = first.end(); n+1 < len(data) && uint64(data[n+1].Offset)-end <= mergeGap; end = data[n].end() {
			n++
			if len(run) == len(first.Bytes) {
				run = slices.Clone(run)
			}
			run = append(append(run, make([]byte, uint64(data[n].Offset)-end)...), data[n].Bytes...)
		}
		joined = append(joined, Data{first.Offset, run})
		n++
	}
	if len(joined) == len(data) {
		return module
	}
	out := []byte(ModuleHeader)
	_ = bodies(module, func(id byte, c *cursor) error { // which has been read before
		if id == moduleData {
			out = appendData(out, joined)
		} else {
			out = appendSection(out, id, c.rest)
		}
		return nil
	})
	return out
}
