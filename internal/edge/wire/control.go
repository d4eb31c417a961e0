package wire

// Control messages of a manager to a runtime (Seed 4, "Messaging").
const (
	Create = 0 // the module's data with its index, JSON
	Delete = 1 // no payload
	Stop   = 2 // ends the runtime; no module, no payload
)

// Control messages of a runtime to its manager, beside channel.OpenChannel and CloseChannel (Seed 4, "Messaging").
const (
	Keepalive  = 0 // a JSON object
	RuntimeLog = 1 // text
	Exited     = 2 // a JSON object
	ModuleLog  = 5 // text
	Profile    = 6 // bytes
)
