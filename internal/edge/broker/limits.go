package broker

import (
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// logInterval is the shortest time between two log lines about the same thing that clients cause.
const logInterval = 10 * time.Second

func rated() rate.Sometimes { return rate.Sometimes{First: 1, Interval: logInterval} }

const (
	// maxClientID and maxName bound client identifiers, and the topics and filters that are kept, in bytes: a key of bbolt
	// has at most 32 768, and a transaction with a longer one would fail again and again, with all that it holds.
	maxClientID, maxName = 1024, 30_000
	// maxLevels bounds their levels, because each can be a node of the tree: 64 KiB of slashes would take 20 MiB.
	maxLevels = 200
	// maxSubscribed bounds the levels of all filters of a session.
	maxSubscribed = 200_000
	// sessionsPerClient times MaxClients bounds the sessions, most of which are of absent clients: a client that takes another
	// identifier for each connection leaves one behind each time.
	sessionsPerClient = 100
)

// levels returns the number of levels of a topic or filter.
func levels(name string) int { return strings.Count(name, "/") + 1 }

// keepable reports whether a topic or filter is within the limits.
func keepable(name string) bool { return len(name) <= maxName && levels(name) <= maxLevels }

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
	limitClients: {"clients", "a client is refused, because there are connections.max clients, or a hundred times as many sessions"},
	limitPacket:  {"packet", "a client is disconnected, because its packet is larger than broker.max_message"},
	limitQueue:   {"queue", lossQueue},
	limitReceiveMaximum: {"receive_maximum",
		"a client is disconnected, because it has sent more than broker.receive_maximum messages at once"},
	limitRetained:   {"retained", "a message is refused, because it cannot be retained (broker.max_retained, broker.max_retained_bytes)"},
	limitTopicAlias: {"topic_alias", "a client is disconnected, because its topic alias is larger than broker.topic_alias_maximum"},
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
