package stats

import (
	"bytes"
	"strconv"
	"unsafe"
)

// v1Unlimited: the v1 files have no word for "no limit"; they show the largest page count in bytes.
const v1Unlimited = 1 << 62

// parseNumber reads the content of a file with one number. "max" and v1's huge numbers are Unlimited.
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

// parseUint is strconv.ParseUint of base 10 that keeps the caller's bytes off the heap.
func parseUint(s []byte) (uint64, bool) {
	v, err := strconv.ParseUint(text(s), 10, 64)
	return v, err == nil
}

// parsePairs calls f for each line "key number"; other lines are what a newer kernel may have to say. The key lives
// as long as content does not change.
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

// parseIOStat reads io.stat of v2: "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6" per device.
func parseIOStat(content []byte) []DeviceIO {
	var devices []DeviceIO
	for line := range bytes.Lines(content) {
		number, rest, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		d, ok := parseDevice(number)
		if !ok {
			continue
		}
		for field := range bytes.FieldsSeq(rest) {
			key, s, _ := bytes.Cut(field, []byte("="))
			v, ok := parseUint(s)
			if !ok {
				continue
			}
			switch text(key) {
			case "rbytes":
				d.ReadBytes = v
			case "wbytes":
				d.WriteBytes = v
			case "rios":
				d.Reads = v
			case "wios":
				d.Writes = v
			}
		}
		devices = append(devices, d)
	}
	return devices
}

// parseBlkio reads a blkio file of v1, "8:0 Read 4096" per device and operation, and calls f for each.
func parseBlkio(content []byte, f func(d DeviceIO, operation string, v uint64)) {
	for line := range bytes.Lines(content) {
		number, rest, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		d, ok := parseDevice(number)
		if !ok { // the sum over all devices, "Total 4096"
			continue
		}
		operation, s, _ := bytes.Cut(rest, []byte(" "))
		if v, ok := parseUint(s); ok {
			f(d, text(operation), v)
		}
	}
}

// parseDevice reads "major:minor".
func parseDevice(s []byte) (DeviceIO, bool) {
	a, b, ok := bytes.Cut(s, []byte(":"))
	if !ok {
		return DeviceIO{}, false
	}
	major, err1 := strconv.ParseUint(text(a), 10, 32)
	minor, err2 := strconv.ParseUint(text(b), 10, 32)
	return DeviceIO{Major: uint32(major), Minor: uint32(minor)}, err1 == nil && err2 == nil
}

// parsePressure reads a pressure file: "some avg10=0.12 avg60=0.05 avg300=0.01 total=123" and the same for "full".
// The kernel counts the total in microseconds.
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

// parsePercent reads a percentage; what is none is 0.
func parsePercent(s []byte) float64 {
	v, err := strconv.ParseFloat(text(s), 64)
	if err != nil || !(v >= 0 && v <= 100) {
		return 0
	}
	return v
}

// text looks at bytes as a string without copying them; the string must not outlive the bytes.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
