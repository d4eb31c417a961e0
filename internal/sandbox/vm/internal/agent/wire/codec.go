package wire

import (
	"encoding/binary"
	"errors"
)

// Messages are sequences of fields: numbers are varints, strings are preceded by their length. A newer version adds
// fields at the end. A decoder ignores unknown fields and reads missing fields as zeros.

var errMessage = errors.New("a message ends within a field, or has a number that is out of range")

type encoder []byte

func (e *encoder) uint(v uint64) { *e = binary.AppendUvarint(*e, v) }
func (e *encoder) int(v int64)   { *e = binary.AppendVarint(*e, v) }

func (e *encoder) bool(v bool) {
	if v {
		e.uint(1)
	} else {
		e.uint(0)
	}
}

func (e *encoder) string(v string) {
	e.uint(uint64(len(v)))
	*e = append(*e, v...)
}

func (e *encoder) strings(v []string) {
	e.uint(uint64(len(v)))
	for _, s := range v {
		e.string(s)
	}
}

type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail() {
	d.err, d.b = errMessage, nil
}

func (d *decoder) uint() uint64 {
	if len(d.b) == 0 {
		return 0
	}
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

// small reads a number, and fails if it is greater than limit.
func (d *decoder) small(limit uint64) uint64 {
	v := d.uint()
	if v > limit {
		d.fail()
		return 0
	}
	return v
}

func (d *decoder) int() int64 {
	if len(d.b) == 0 {
		return 0
	}
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) bool() bool { return d.uint() != 0 }

func (d *decoder) string() string {
	n := d.uint()
	if n > uint64(len(d.b)) {
		d.fail()
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

// count reads the length of a list, and fails if the rest of the message is too short for one byte per element.
func (d *decoder) count() int {
	n := d.uint()
	if n > uint64(len(d.b)) {
		d.fail()
		return 0
	}
	return int(n)
}

// list reads a list's length and calls element for each of its elements.
func (d *decoder) list(element func()) {
	for range d.count() {
		if len(d.b) == 0 {
			d.fail()
			return
		}
		element()
	}
}

func (d *decoder) strings() (all []string) {
	d.list(func() { all = append(all, d.string()) })
	return all
}
