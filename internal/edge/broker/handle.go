package broker

import (
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
	"github.com/tripod-run/tripod/internal/guard"
)

// maxConnect bounds CONNECT, which anybody may send, in bytes. Its fields have at most 64 KiB each.
const maxConnect = 1 << 20

// filtersAtOnce is the number of filters that one SUBSCRIBE adds without letting go of server.mu.
const filtersAtOnce = 100

var (
	// errDone ends a connection that has nothing more to say.
	errDone = errors.New("the client has disconnected")
	// errTakenOver ends a connection whose session belongs to another one now.
	errTakenOver = &packet.Error{Code: packet.SessionTakenOver, Text: "another connection has taken the session over"}
)

// serve serves a connection until it is parked or ends.
func (s *server) serve(c *conn) {
	parked := false
	defer func() {
		if p := recover(); p != nil {
			_ = guard.Report(s.log.With("remote", c.RemoteAddr().String()), "MQTT client", p)
		}
		if parked {
			return
		}
		c.end(0)
		s.leave(c)
		c.awaitEnd()
		c.in.release()
		s.serving.Done()
	}()
	var err error
	if c.session == nil {
		err = c.greet()
	}
	for err == nil {
		if err = c.one(); errors.Is(err, errSilent) {
			if parked = s.parking.park(c); parked {
				return
			}
			c.in.refused, err = true, nil
		}
	}
	var bad *packet.Error
	switch {
	case errors.As(err, &bad):
		switch bad.Code {
		case packet.TooLarge:
			s.meet(limitPacket, c.id)
		case packet.ReceiveMaximumExceeded:
			s.meet(limitReceiveMaximum, c.id)
		}
		c.end(bad.Code)
	case timedOut(err) && c.session != nil:
		c.end(packet.KeepAliveTimeout)
	}
	s.log.Debug("broker: a client is gone", "client", c.id, "remote", c.RemoteAddr().String(), "why", err)
}

// one handles one packet.
func (c *conn) one() error {
	first, body, own, err := c.in.next(c.keepAlive, c.server.cfg.MaxPacket, c.level)
	if err != nil {
		return err
	}
	p, err := packet.Decode(first, body, c.level)
	if err != nil {
		return err
	}
	switch p := p.(type) {
	case *packet.Publish:
		err = c.publish(p, own)
	case *packet.Ack:
		if p.Type == packet.PUBREL {
			err = c.release(p)
		} else {
			err = c.acknowledged(p)
		}
	case *packet.Subscribe:
		err = c.subscribe(p)
	case *packet.Unsubscribe:
		err = c.unsubscribe(p)
	case *packet.Ping:
		if p.Type == packet.PINGRESP {
			return &packet.Error{Code: packet.ProtocolError, Text: "PINGRESP from a client"}
		}
		c.pong()
	case *packet.End:
		return c.disconnect(p)
	default:
		return &packet.Error{Code: packet.ProtocolError, Text: "a packet that no client sends here"}
	}
	c.settle()
	return err
}

// greet handles the first packet, which must be a CONNECT, and begins or resumes the client's session.
func (c *conn) greet() error {
	s := c.server
	if err := c.setReadDeadline(time.Now().Add(s.connectTimeout)); err != nil {
		return err
	}
	first, body, _, err := c.in.next(0, min(s.cfg.MaxPacket, maxConnect), 0)
	if err != nil {
		return err
	}
	if packet.Type(first>>4) != packet.CONNECT {
		return errors.New("the first packet is not CONNECT")
	}
	c.level = packet.Level(body)
	p, err := packet.Decode(first, body, 0)
	if err == nil {
		err = packet.CheckLength(len(body), int(c.in.size), c.level)
	}
	if err != nil {
		var bad *packet.Error
		if errors.As(err, &bad) && (c.level == 5 || bad.Code == packet.UnsupportedVersion) {
			return c.refuse(bad.Code, bad.Text)
		}
		return err
	}
	connect := p.(*packet.Connect)
	if err := c.accept(connect); err != nil {
		return err
	}
	c.in.bare = c.socket != nil
	c.keepAlive = time.Duration(connect.KeepAlive) * time.Second * 3 / 2
	if c.keepAlive == 0 {
		return c.setReadDeadline(time.Time{})
	}
	return nil
}

// refuse answers a CONNECT with a reason code.
func (c *conn) refuse(code packet.Code, why string) error {
	c.server.refused.Add(1)
	c.answer(&packet.Connack{Code: code}, 0, 0)
	c.mu.Lock()
	c.reason = true
	c.mu.Unlock()
	return errors.New(why)
}

// accept checks a CONNECT, begins or resumes the session, and answers.
func (c *conn) accept(p *packet.Connect) error {
	s := c.server
	c.level, c.bridge, c.id = p.Level, p.Bridge, p.ClientID
	certified := c.commonName()
	if c.user = p.Username; c.user == "" {
		c.user = certified
	}
	switch {
	case p.Properties.Has(packet.AuthMethod):
		return c.refuse(packet.BadAuthMethod, "enhanced authentication is not supported")
	case !s.users.admit(p.Username, p.Password, certified):
		return c.refuse(packet.BadUserOrPassword, "the user or password is wrong")
	case len(c.id) > maxClientID:
		return c.refuse(packet.ClientIDNotValid, "the client identifier is too long")
	case p.Will != nil && p.Will.Retain && !keepable(p.Will.Topic):
		return c.refuse(packet.TopicNameInvalid, "the will's topic is too long to be retained")
	case c.id == "" && (p.Level == 3 || p.Level == 4 && !p.CleanStart):
		return c.refuse(packet.ClientIDNotValid, "there is no client identifier")
	}
	answer := &packet.Properties{}
	if c.id == "" {
		c.id = "auto-" + rand.Text()
		answer.SetText(packet.AssignedClientID, c.id)
	}
	c.window = uint16(p.Properties.NumberOr(packet.ReceiveMaximum, 65_535))
	c.maxPacket = p.Properties.NumberOr(packet.MaximumPacketSize, packet.MaxLength+5)
	c.aliasLimit = uint16(min(int(p.Properties.Number(packet.TopicAliasMaximum)), s.cfg.TopicAliasMaximum))
	limit := uint32(s.cfg.SessionExpiry / time.Second)
	wanted := p.Properties.Number(packet.SessionExpiry)
	if p.Level < 5 && !p.CleanStart {
		wanted = limit
	}
	c.expires = time.Duration(min(wanted, limit)) * time.Second
	if wanted > limit {
		answer.SetNumber(packet.SessionExpiry, limit)
	}
	if w := p.Will; w != nil {
		c.will = s.newWill(c, w, p.KeepAlive)
	}
	c.mu.Lock()
	c.busy = true
	c.entry.Begin()
	c.mu.Unlock()
	present, code := s.enter(c, p.CleanStart)
	if code.Failed() {
		c.will = nil
		return c.refuse(code, "the session cannot be used: "+code.String())
	}
	answer.SetNumber(packet.ReceiveMaximum, uint32(s.cfg.ReceiveMaximum))
	answer.SetNumber(packet.MaximumPacketSize, uint32(s.cfg.MaxPacket))
	answer.SetNumber(packet.TopicAliasMaximum, uint32(s.cfg.TopicAliasMaximum))
	c.answer(&packet.Connack{SessionPresent: present, Properties: answer}, 0, s.store.needed())
	return nil
}

// publish handles PUBLISH.
func (c *conn) publish(p *packet.Publish, own bool) error {
	s := c.server
	s.received.Add(1)
	if p.Properties.Has(packet.SubscriptionID) {
		return &packet.Error{Code: packet.ProtocolError, Text: "a client's PUBLISH has a subscription identifier"}
	}
	topic, err := c.resolve(p)
	if err != nil {
		return err
	}
	known := p.QoS == 2 && c.session.isReceived(p.ID)
	if p.QoS > 0 && !known && !c.received() {
		return &packet.Error{Code: packet.ReceiveMaximumExceeded, Text: "more messages than the receive maximum"}
	}
	if known { // also without DUP: until PUBREL it is the same message (MQTT 5.0 §4.3.3)
		c.answer(&packet.Ack{Type: packet.PUBREC, ID: p.ID}, 0, s.store.needed())
		return nil
	}
	code := c.mayPublish(topic)
	if !code.Failed() {
		if !own {
			p.Payload = slices.Clone(p.Payload)
		}
		current := true
		err := s.publish(newMessage(p, topic, c.id, time.Now()), func() bool {
			current = p.QoS < 2 || c.session.receive(c, p.ID)
			return current
		})
		if !current {
			return errTakenOver
		}
		var bad *packet.Error
		if errors.As(err, &bad) {
			code = bad.Code
			c.session.released(c, p.ID)
		}
	}
	if code.Failed() && p.QoS == 0 && code == packet.TopicNameInvalid {
		return &packet.Error{Code: code, Text: "messages to this topic are not accepted"}
	}
	batch := uint64(0)
	if !code.Failed() {
		batch = s.store.needed()
	}
	switch p.QoS {
	case 1:
		c.answer(&packet.Ack{Type: packet.PUBACK, ID: p.ID, Code: code}, 1, batch)
	case 2:
		final := 0
		if code.Failed() && c.level == 5 {
			final = 1
		}
		c.answer(&packet.Ack{Type: packet.PUBREC, ID: p.ID, Code: code}, final, batch)
	}
	s.store.throttle()
	return nil
}

// resolve returns the topic of a PUBLISH, which may have an alias instead (MQTT 5.0 §3.3.2.3.4).
func (c *conn) resolve(p *packet.Publish) (string, error) {
	if !p.Properties.Has(packet.TopicAlias) {
		return p.Topic, nil
	}
	alias := uint16(p.Properties.Number(packet.TopicAlias))
	if int(alias) > c.server.cfg.TopicAliasMaximum {
		c.server.meet(limitTopicAlias, c.id)
		return "", &packet.Error{Code: packet.TopicAliasInvalid, Text: "the topic alias is larger than the maximum"}
	}
	if p.Topic == "" {
		topic, ok := c.aliases[alias]
		if !ok {
			return "", &packet.Error{Code: packet.TopicAliasInvalid, Text: "the topic alias is not known"}
		}
		return topic, nil
	}
	if c.aliases == nil {
		c.aliases = map[uint16]string{}
	}
	c.aliases[alias] = p.Topic
	return p.Topic, nil
}

// mayPublish returns why the client may not publish to a topic, or Success.
func (c *conn) mayPublish(topic string) packet.Code {
	s := c.server
	switch {
	case strings.HasPrefix(topic, packet.SharePrefix):
		return packet.TopicNameInvalid
	case isSystem(topic), !s.users.allowed(c.user, c.id, topic, true):
		s.denied.Add(1)
		return packet.NotAuthorized
	}
	return packet.Success
}

// release handles PUBREL. The disk has to know it before the client gets PUBCOMP, because the client may then use the
// identifier for another message.
func (c *conn) release(p *packet.Ack) error {
	answer := &packet.Ack{Type: packet.PUBCOMP, ID: p.ID}
	final := 1
	if !c.session.released(c, p.ID) {
		answer.Code, final = packet.IDNotFound, 0
	}
	c.answer(answer, final, c.server.store.needed())
	return nil
}

// acknowledged handles PUBACK, PUBREC and PUBCOMP.
func (c *conn) acknowledged(p *packet.Ack) error {
	wrong := func() error {
		return &packet.Error{Code: packet.ProtocolError, Text: p.Type.String() + " for a message that it does not belong to"}
	}
	s := c.session
	s.mu.Lock()
	if s.conn != c {
		s.mu.Unlock()
		return errTakenOver
	}
	defer s.mu.Unlock()
	e := s.flight[p.ID]
	switch {
	case e == nil && p.Type == packet.PUBREC && !p.Code.Failed():
		c.answer(&packet.Ack{Type: packet.PUBREL, ID: p.ID, Code: packet.IDNotFound}, 0, 0)
	case e == nil: // the session that it belongs to may have ended
	case p.Type == packet.PUBACK && e.qos != 1, p.Type != packet.PUBACK && e.qos != 2:
		return wrong()
	case p.Type == packet.PUBREC && !p.Code.Failed():
		if !e.released {
			s.release(e)
		}
		c.answer(&packet.Ack{Type: packet.PUBREL, ID: p.ID}, 0, s.server.store.needed())
	case p.Type == packet.PUBCOMP && !e.released:
		return wrong()
	default:
		s.drop(e)
		c.kick()
	}
	return nil
}

// subscribe handles SUBSCRIBE.
func (c *conn) subscribe(p *packet.Subscribe) error {
	s := c.server
	answer := &packet.Suback{Type: packet.SUBACK, ID: p.ID}
	if slices.ContainsFunc(p.Filters, func(f packet.Subscription) bool {
		return f.Filter == SessionsTopic && s.users.allowed(c.user, c.id, f.Filter, false)
	}) {
		s.listSessions()
	}
	for some := range slices.Chunk(p.Filters, filtersAtOnce) { // so that others get their turn
		codes, err := c.subscribeTo(some, firstID(p.Properties))
		if err != nil {
			return err
		}
		answer.Codes = append(answer.Codes, codes...)
		s.store.throttle()
	}
	c.answer(answer, 0, s.store.needed())
	return nil
}

// subscribeTo adds subscriptions and returns their reason codes.
func (c *conn) subscribeTo(filters []packet.Subscription, id uint32) (codes []packet.Code, err error) {
	s := c.server
	defer s.store.begin()()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !c.owns() {
		return nil, errTakenOver
	}
	now := time.Now()
	for _, f := range filters {
		if !s.users.allowed(c.user, c.id, f.Filter, false) {
			s.denied.Add(1)
			codes = append(codes, packet.NotAuthorized)
			continue
		}
		if !keepable(f.Filter) {
			codes = append(codes, packet.TopicFilterInvalid)
			continue
		}
		if c.session.subs[f.Filter] == nil && int(c.session.levels)+levels(f.Filter) > maxSubscribed {
			codes = append(codes, packet.QuotaExceeded)
			continue
		}
		shared := strings.HasPrefix(f.Filter, packet.SharePrefix)
		f.NoLocal = f.NoLocal || c.bridge && !shared
		sub, added := s.subscribe(c.session, f, id)
		if c.expires > 0 {
			s.records.putSubscription(sub)
		}
		if !shared && (f.RetainHandling == 0 || f.RetainHandling == 1 && added) {
			s.sendRetained(sub, now)
		}
		codes = append(codes, packet.Code(f.QoS))
	}
	return codes, nil
}

func firstID(p *packet.Properties) uint32 {
	if ids := p.SubscriptionIDs(); len(ids) > 0 {
		return ids[0]
	}
	return 0
}

// owns reports whether the session is still this connection's. server.mu is locked.
func (c *conn) owns() bool {
	c.session.mu.Lock()
	defer c.session.mu.Unlock()
	return c.session.conn == c
}

// unsubscribe handles UNSUBSCRIBE.
func (c *conn) unsubscribe(p *packet.Unsubscribe) error {
	s := c.server
	answer := &packet.Suback{Type: packet.UNSUBACK, ID: p.ID}
	s.mu.Lock()
	if !c.owns() {
		s.mu.Unlock()
		return errTakenOver
	}
	for _, f := range p.Filters {
		code := packet.NoSubscriptionExisted
		if s.unsubscribe(c.session, f) {
			code = packet.Success
			s.records.deleteSubscription(c.id, f)
		}
		answer.Codes = append(answer.Codes, code)
	}
	s.mu.Unlock()
	c.answer(answer, 0, s.store.needed())
	return nil
}

// disconnect handles DISCONNECT, and refuses AUTH, because no CONNECT with an authentication method is accepted.
func (c *conn) disconnect(p *packet.End) error {
	switch {
	case p.Type == packet.AUTH:
		return &packet.Error{Code: packet.ProtocolError, Text: "AUTH without an authentication method"}
	case p.Properties.Has(packet.ServerReference), !slices.Contains(clientCodes, p.Code):
		return &packet.Error{Code: packet.ProtocolError, Text: "DISCONNECT as only a server sends it"}
	case p.Properties.Number(packet.SessionExpiry) > 0 && c.expires == 0:
		return &packet.Error{Code: packet.ProtocolError, Text: "DISCONNECT has a session expiry, and CONNECT had none"}
	}
	if p.Properties.Has(packet.SessionExpiry) {
		limit := uint32(c.server.cfg.SessionExpiry / time.Second)
		c.session.setExpiry(c, time.Duration(min(p.Properties.Number(packet.SessionExpiry), limit))*time.Second)
	}
	if p.Code == packet.Success {
		if w := c.takeWill(); w != nil {
			c.server.records.deleteWill(w)
		}
	}
	return errDone
}

// clientCodes are the reason codes that a client's DISCONNECT may have (MQTT 5.0 §3.14.2.1).
var clientCodes = []packet.Code{0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99}
