package packet

import "fmt"

// Type is the type of a control packet (MQTT 5.0 §2.1.2).
type Type byte

// The types of packets.
const (
	CONNECT Type = iota + 1
	CONNACK
	PUBLISH
	PUBACK
	PUBREC
	PUBREL
	PUBCOMP
	SUBSCRIBE
	SUBACK
	UNSUBSCRIBE
	UNSUBACK
	PINGREQ
	PINGRESP
	DISCONNECT
	AUTH
)

var typeNames = [...]string{
	"will", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE", "SUBACK", "UNSUBSCRIBE", "UNSUBACK",
	"PINGREQ", "PINGRESP", "DISCONNECT", "AUTH",
}

func (t Type) String() string {
	if int(t) < len(typeNames) {
		return typeNames[t]
	}
	return fmt.Sprintf("packet type %d", byte(t))
}

// Packet is a control packet: one of the types below, by pointer.
type Packet interface {
	// appendBody appends all that follows the fixed header.
	appendBody(to []byte, level byte) []byte
	// first returns the first byte of the fixed header.
	first() byte
}

// Connect is CONNECT.
type Connect struct {
	// Level is the protocol level without the bridge bit.
	Level byte
	// Bridge is the highest bit of the protocol level, by which clients of MQTT 3.1 and 3.1.1 ask for No Local. It is an
	// extension by mosquitto.
	Bridge      bool
	CleanStart  bool // Clean Session before MQTT 5.0
	KeepAlive   uint16
	Properties  *Properties
	ClientID    string
	Will        *Will
	HasUsername bool
	Username    string
	HasPassword bool
	Password    []byte
}

// Will is the will of a CONNECT.
type Will struct {
	Topic      string
	Payload    []byte
	QoS        byte
	Retain     bool
	Properties *Properties
}

// Connack is CONNACK. Before MQTT 5.0 its code is a return code of MQTT 3.1.1 §3.2.2.3; Append converts a reason code.
type Connack struct {
	SessionPresent bool
	Code           Code
	Properties     *Properties
}

// Publish is PUBLISH.
type Publish struct {
	Dup, Retain bool
	QoS         byte
	ID          uint16 // with QoS 1 and 2
	Topic       string
	Properties  *Properties
	Payload     []byte
}

// Ack is PUBACK, PUBREC, PUBREL or PUBCOMP.
type Ack struct {
	Type       Type
	ID         uint16
	Code       Code // sent only in MQTT 5.0
	Properties *Properties
}

// Subscription is a filter in a SUBSCRIBE, with its options.
type Subscription struct {
	Filter            string
	QoS               byte
	NoLocal           bool
	RetainAsPublished bool
	RetainHandling    byte
}

// Subscribe is SUBSCRIBE.
type Subscribe struct {
	ID         uint16
	Properties *Properties
	Filters    []Subscription
}

// Unsubscribe is UNSUBSCRIBE.
type Unsubscribe struct {
	ID         uint16
	Properties *Properties
	Filters    []string
}

// Suback is SUBACK or UNSUBACK.
type Suback struct {
	Type       Type
	ID         uint16
	Properties *Properties
	Codes      []Code // before MQTT 5.0 an UNSUBACK has none
}

// Ping is PINGREQ or PINGRESP.
type Ping struct{ Type Type }

// End is DISCONNECT or AUTH.
type End struct {
	Type       Type
	Code       Code
	Properties *Properties
}

// Return returns the return code of MQTT 3.1.1 §3.2.2.3 for a reason code. Return codes themselves stay as they are.
func (c Code) Return() Code {
	switch c {
	case UnsupportedVersion:
		return 1
	case ClientIDNotValid:
		return 2
	case BadUserOrPassword:
		return 4
	case NotAuthorized:
		return 5
	}
	if c.Failed() {
		return 3 // server unavailable
	}
	return c
}
