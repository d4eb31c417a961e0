package stats

import (
	"bytes"
	"strconv"
	"unsafe"
)

// v1Unlimited is the smallest number that counts as no limit. If there is no limit, cgroup v1 shows the largest
// possible number of bytes in whole pages.
const v1Unlimited = 1 << 62

// parseNumber parses the content of a file with one number. "max" and numbers of at least v1Unlimited become Unlimited.
func parseNumber(content []byte) (uint64, bool) {
	s := bytes.TrimSpace(content)
	if text(s) == "max" {
		return Unlimited, true
	}
	v, ok := parseUint(s)
	if v >= v1Unlimited {
		v = Unlimited
	}
	return v, ok
}

// parseUint parses a decimal number without copying s.
func parseUint(s []byte) (uint64, bool) {
	v, err := strconv.ParseUint(text(s), 10, 64)
	return v, err == nil
}

// parsePairs calls f for each line of the form "key number", and skips all other lines. The key is valid until the
// content changes.
func parsePairs(content []byte, f func(key string, v uint64)) {
	for line := range bytes.Lines(content) {
		key, rest, ok := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		if !ok {
			continue
		}
		if v, ok := parseUint(rest); ok {
			f(text(key), v)
		}
	}
}

// parsePressure parses a pressure file: "some avg10=0.12 avg60=0.05 avg300=0.01 total=123" and the same for "full". In
// the file, the total is in microseconds. parsePressure returns nil if neither line exists.
func parsePressure(content []byte) *Pressure {
	var p Pressure
	seen := false
	for line := range bytes.Lines(content) {
		kind, rest, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		switch text(kind) {
		case "some":
			p.Some, seen = parseStall(rest), true
		case "full":
			p.Full, seen = parseStall(rest), true
		}
	}
	if !seen {
		return nil
	}
	return &p
}

func parseStall(line []byte) Stall {
	var s Stall
	for field := range bytes.FieldsSeq(line) {
		key, number, _ := bytes.Cut(field, []byte("="))
		switch text(key) {
		case "total":
			us, _ := parseUint(number)
			s.Total = us * 1000
		case "avg10":
			s.Avg10 = parsePercent(number)
		case "avg60":
			s.Avg60 = parsePercent(number)
		case "avg300":
			s.Avg300 = parsePercent(number)
		}
	}
	return s
}

// parsePercent parses a percentage. It returns 0 for anything else.
func parsePercent(s []byte) float64 {
	v, err := strconv.ParseFloat(text(s), 64)
	if err != nil || !(v >= 0 && v <= 100) {
		return 0
	}
	return v
}

// text returns b as a string without copying it. The string is valid until b changes.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
