package mqtt

import (
	"bufio"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// readPacket reads and decodes one packet, which may have at most the given size after its length.
func readPacket(r *bufio.Reader, version byte, limit int64) (packet.Packet, error) {
	first, err := r.ReadByte()
	if err != nil {
		return nil, err
	}
	length, err := readLength(r)
	if err != nil {
		return nil, fmt.Errorf("mqtt: length of a packet: %w", err)
	}
	if int64(length) > limit {
		return nil, fmt.Errorf("mqtt: the broker sent a packet of %d bytes, more than the limit of %d: %w", length, limit,
			errdefs.ErrResourceExhausted)
	}
	body := make([]byte, length)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, fmt.Errorf("mqtt: packet of %d bytes: %w", length, err)
	}
	p, err := packet.Decode(first, body, version)
	if err != nil {
		return nil, fmt.Errorf("mqtt: packet from the broker: %w", err)
	}
	return p, nil
}

func readLength(r *bufio.Reader) (int, error) {
	var b []byte
	for {
		c, err := r.ReadByte()
		if err != nil {
			return 0, err
		}
		b = append(b, c)
		switch length, size := packet.Length(b); {
		case size < 0:
			return 0, &packet.Error{Code: packet.Malformed, Text: "it has more than four bytes"}
		case size > 0:
			return length, nil
		}
	}
}

// connectPacket returns the CONNECT (MQTT 3.1.1 §3.1, MQTT 5.0 §3.1).
func connectPacket(c Config) *packet.Connect {
	p := &packet.Connect{
		ClientID: c.ClientID, CleanStart: c.SessionExpiry == 0, KeepAlive: uint16(min(max(c.KeepAlive.Seconds(), 1), 65_535)),
		HasUsername: c.Username != "", Username: c.Username, HasPassword: c.Password != "", Password: []byte(c.Password),
		Bridge: c.Protocol < 5 && c.NoLocal,
	}
	if w := c.Will; w != nil {
		p.Will = &packet.Will{Topic: w.Topic, Payload: w.Payload, QoS: w.QoS, Retain: w.Retain, Properties: &packet.Properties{}}
		if w.Delay > 0 {
			p.Will.Properties.SetNumber(packet.WillDelay, seconds(w.Delay))
		}
	}
	p.Properties = &packet.Properties{}
	p.Properties.SetNumber(packet.ReceiveMaximum, receiveMaximum).SetNumber(packet.MaximumPacketSize, uint32(c.MaxPacket))
	if c.SessionExpiry > 0 {
		p.Properties.SetNumber(packet.SessionExpiry, seconds(c.SessionExpiry))
	}
	return p
}

// seconds returns d as MQTT encodes it: in whole seconds, rounded up, in 32 bits.
func seconds(d time.Duration) uint32 {
	return uint32(min(int64((d+time.Second-1)/time.Second), 0xffff_ffff))
}
