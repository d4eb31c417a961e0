package packet

import "fmt"

// Code is a reason code (MQTT 5.0 §2.4). Codes from 0x80 on are errors.
type Code byte

// The reason codes that this module uses or compares with; MQTT 5.0 table 2-6 has all of them.
const (
	Success                Code = 0x00
	DisconnectWithWill     Code = 0x04
	NoMatchingSubscribers  Code = 0x10
	NoSubscriptionExisted  Code = 0x11
	ContinueAuthentication Code = 0x18
	ReAuthenticate         Code = 0x19
	Unspecified            Code = 0x80
	Malformed              Code = 0x81
	ProtocolError          Code = 0x82
	UnsupportedVersion     Code = 0x84
	ClientIDNotValid       Code = 0x85
	BadUserOrPassword      Code = 0x86
	NotAuthorized          Code = 0x87
	ServerUnavailable      Code = 0x88
	ShuttingDown           Code = 0x8b
	BadAuthMethod          Code = 0x8c
	KeepAliveTimeout       Code = 0x8d
	SessionTakenOver       Code = 0x8e
	TopicFilterInvalid     Code = 0x8f
	TopicNameInvalid       Code = 0x90
	IDInUse                Code = 0x91
	IDNotFound             Code = 0x92
	ReceiveMaximumExceeded Code = 0x93
	TopicAliasInvalid      Code = 0x94
	TooLarge               Code = 0x95
	QuotaExceeded          Code = 0x97
)

var codeNames = map[Code]string{
	0x80: "unspecified error", 0x81: "malformed packet", 0x82: "protocol error", 0x83: "implementation specific error",
	0x84: "unsupported protocol version", 0x85: "client identifier not valid", 0x86: "bad user name or password", 0x87: "not authorized",
	0x88: "server unavailable", 0x89: "server busy", 0x8a: "banned", 0x8b: "server shutting down", 0x8c: "bad authentication method",
	0x8d: "keep alive timeout", 0x8e: "session taken over", 0x8f: "topic filter invalid", 0x90: "topic name invalid",
	0x91: "packet identifier in use", 0x92: "packet identifier not found", 0x93: "receive maximum exceeded", 0x94: "topic alias invalid",
	0x95: "packet too large", 0x96: "message rate too high", 0x97: "quota exceeded", 0x98: "administrative action",
	0x99: "payload format invalid", 0x9a: "retain not supported", 0x9b: "QoS not supported", 0x9c: "use another server", 0x9d: "server moved",
	0x9e: "shared subscriptions not supported", 0x9f: "connection rate exceeded", 0xa0: "maximum connect time",
	0xa1: "subscription identifiers not supported", 0xa2: "wildcard subscriptions not supported",
}

// Failed reports whether the code is an error.
func (c Code) Failed() bool { return c >= 0x80 }

// String returns the name of an error, and the number.
func (c Code) String() string {
	if name, ok := codeNames[c]; ok {
		return fmt.Sprintf("%s (0x%02x)", name, byte(c))
	}
	return fmt.Sprintf("0x%02x", byte(c))
}

// Error is a packet that must not be accepted. Code is the reason code of the DISCONNECT or CONNACK that answers it.
type Error struct {
	Code Code
	Text string
}

func (e *Error) Error() string { return fmt.Sprintf("mqtt: %s: %v", e.Text, e.Code) }

func malformed(format string, args ...any) error {
	return &Error{Malformed, fmt.Sprintf(format, args...)}
}

func violation(format string, args ...any) error {
	return &Error{ProtocolError, fmt.Sprintf(format, args...)}
}

// validCodes are the reason codes that a packet may carry (MQTT 5.0 §3.4.2.1 and its siblings).
var validCodes = map[Type][]Code{
	PUBACK:   {0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
	PUBREC:   {0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
	PUBREL:   {0x00, 0x92},
	PUBCOMP:  {0x00, 0x92},
	SUBACK:   {0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8f, 0x91, 0x97, 0x9e, 0xa1, 0xa2},
	UNSUBACK: {0x00, 0x11, 0x80, 0x83, 0x87, 0x8f, 0x91},
	DISCONNECT: {0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8b, 0x8d, 0x8e, 0x8f, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a,
		0x9b, 0x9c, 0x9d, 0x9e, 0x9f, 0xa0, 0xa1, 0xa2},
	AUTH: {0x00, 0x18, 0x19},
}
