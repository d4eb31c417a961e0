package broker

import (
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// logInterval is the shortest time between two log lines about the same thing that clients cause.
const logInterval = 10 * time.Second

func rated() rate.Sometimes { return rate.Sometimes{First: 1, Interval: logInterval} }

// limit is a limit of Config that clients can meet.
type limit int

const (
	limitClients limit = iota
	limitPacket
	limitQueue
	limitReceiveMaximum
	limitRetained
	limitTopicAlias
	limitCount
)

// limitTexts holds, for each limit, its name in Stats.Limits, and what the log says with the keys of the node's
// configuration.
var limitTexts = [limitCount]struct{ name, log string }{
	limitClients:        {"clients", "a client is refused, because there are connections.max clients"},
	limitPacket:         {"packet", "a client is disconnected, because its packet is larger than broker.max_message"},
	limitQueue:          {"queue", "messages are dropped, because the client's queue is full (broker.max_queued, broker.max_queued_bytes)"},
	limitReceiveMaximum: {"receive_maximum", "a client is disconnected, because it has sent more than broker.receive_maximum messages at once"},
	limitRetained:       {"retained", "a message is refused, because it cannot be retained (broker.max_retained, broker.max_retained_bytes)"},
	limitTopicAlias:     {"topic_alias", "a client is disconnected, because its topic alias is larger than broker.topic_alias_maximum"},
}

// meter counts how often clients have met a limit.
type meter struct {
	count atomic.Uint64
	log   rate.Sometimes
}

// meet counts and logs that a client has met a limit.
func (s *server) meet(l limit, client string) {
	s.meters[l].count.Add(1)
	s.meters[l].log.Do(func() { s.log.Warn("broker: "+limitTexts[l].log, "client", client) })
}

// met returns Stats.Limits.
func (s *server) met() map[string]uint64 {
	all := make(map[string]uint64, limitCount)
	for l := range s.meters {
		all[limitTexts[l].name] = s.meters[l].count.Load()
	}
	return all
}
