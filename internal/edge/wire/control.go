package wire

// Control messages from a manager to a runtime.
const (
	Create = 0 // the module's data with its index, as JSON
	Delete = 1 // no payload
	Stop   = 2 // ends the runtime; no module, no payload
)

// Control messages from a runtime to its manager, besides channel.OpenChannel and channel.CloseChannel.
const (
	Keepalive  = 0 // a JSON object
	RuntimeLog = 1 // text
	Exited     = 2 // a JSON object
	ModuleLog  = 5 // text
	Profile    = 6 // bytes
)

// Exit codes of modules that their runtime does not report.
const (
	CodeNotCreated = 125 // as container engines report for a container that could not start
	CodeKilled     = 137
)

// ParseLog splits the payload of a log message into level and text. Later peers put a byte before the text: 0x80 plus
// the level. No UTF-8 text begins with such a byte. Without that byte, the first result is -1.
func ParseLog(payload []byte) (level int, text []byte) {
	if len(payload) > 0 && payload[0]&0xc0 == 0x80 {
		return int(payload[0] &^ 0x80), payload[1:]
	}
	return -1, payload
}
