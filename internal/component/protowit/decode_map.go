package protowit

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"math/bits"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// entrySpan is the position of a map entry in the flat bytes. The field end is 0 if a later entry has the same key.
type entrySpan struct{ start, value, end int }

// mapping writes the entries of a map as a list of tuples. For each key, it keeps only the last entry, at the position
// of that entry.
func (d *decoder) mapping(dst []byte, f *field, first uint32, depth int) ([]byte, error) {
	at, base := len(dst), len(d.entries)
	dst = wit.AppendLen(dst, 0)
	n := 0
	for c := d.cursor(first); c.next(); n++ {
		var err error
		span := entrySpan{start: len(dst)}
		if dst, span.value, err = d.entry(dst, f.entry, c.record, depth); err != nil {
			return nil, element(err, n)
		}
		span.end = len(dst)
		d.entries = append(d.entries, span)
	}
	entries := d.entries[base:]
	if dropped := d.duplicates(dst, entries); dropped > 0 {
		n -= dropped
		dst = compact(dst, entries)
	}
	d.entries = d.entries[:base]
	binary.LittleEndian.PutUint32(dst[at:], uint32(n))
	return dst, nil
}

// entry writes one entry. An entry is a message with a key and a value, both optional. An entry does not count as a
// level of nesting.
func (d *decoder) entry(dst []byte, m *Message, r record, depth int) (_ []byte, valueAt int, err error) {
	base, regions := d.push(m)
	if err := d.index(m, base, r.start, r.end, depth); err != nil {
		return nil, 0, err
	}
	for i := range m.slots {
		valueAt = len(dst)
		f := m.slots[i].fields[0]
		if dst, err = d.single(dst, slotValue, f, d.states[base+i], depth); err != nil {
			return nil, 0, within(err, f.name)
		}
	}
	d.pop(base, regions)
	if len(dst) > d.limit {
		return nil, 0, errExpansion
	}
	return dst, valueAt, nil
}

// linearMax is the maximum number of entries for a linear search. Up to this number, each key is simply compared with
// all later keys.
const linearMax = 8

// duplicates marks the entries whose keys appear again later, and returns their number.
func (d *decoder) duplicates(dst []byte, entries []entrySpan) (dropped int) {
	key := func(e entrySpan) []byte { return dst[e.start:e.value] }
	if len(entries) <= linearMax {
		for i := range entries {
			for _, later := range entries[i+1:] {
				if bytes.Equal(key(entries[i]), key(later)) {
					entries[i].end = 0
					dropped++
					break
				}
			}
		}
		return dropped
	}
	// The table is a hash table with open addressing, at most half full; 0 marks a free slot.
	size := 1 << bits.Len(uint(2*len(entries)-1))
	if cap(d.table) < size {
		d.table = make([]uint32, size)
	}
	table := d.table[:size]
	clear(table)
	for i, e := range entries {
		for at := maphash.Bytes(seed, key(e)); ; at++ {
			p := &table[at&uint64(size-1)]
			if *p == 0 {
				*p = uint32(i + 1)
				break
			}
			if old := &entries[*p-1]; bytes.Equal(key(*old), key(e)) {
				old.end = 0
				dropped++
				*p = uint32(i + 1)
				break
			}
		}
	}
	return dropped
}

// seed is random, so that clients cannot choose keys that collide.
var seed = maphash.MakeSeed()

// compact removes the marked entries.
func compact(dst []byte, entries []entrySpan) []byte {
	to := entries[0].start
	for _, e := range entries {
		if e.end != 0 {
			to += copy(dst[to:], dst[e.start:e.end])
		}
	}
	return dst[:to]
}
