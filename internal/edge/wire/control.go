package wire

// Control messages of a manager to a runtime.
const (
	Create = 0 // the module's data with its index, JSON
	Delete = 1 // no payload
	Stop   = 2 // ends the runtime; no module, no payload
)

// Control messages of a runtime to its manager, besides channel.OpenChannel and channel.CloseChannel.
const (
	Keepalive  = 0 // a JSON object
	RuntimeLog = 1 // text
	Exited     = 2 // a JSON object
	ModuleLog  = 5 // text
	Profile    = 6 // bytes
)

// ParseLog splits the payload of a log message into level and text. Later peers prefix the text with a byte of 0x80 and the level,
// which begins no UTF-8 text; level is -1 without it.
func ParseLog(payload []byte) (level int, text []byte) {
	if len(payload) > 0 && payload[0]&0xc0 == 0x80 {
		return int(payload[0] &^ 0x80), payload[1:]
	}
	return -1, payload
}
