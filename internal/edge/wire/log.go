package wire

// ParseLog splits a log message of a later peer, whose first byte is 0x80 and the level, from its text; level is -1 where there
// is none. (No UTF-8 text begins with such a byte.)
func ParseLog(payload []byte) (level int, text []byte) {
	if len(payload) > 0 && payload[0]&0xc0 == 0x80 {
		return int(payload[0] &^ 0x80), payload[1:]
	}
	return -1, payload
}
