package edgetest

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Line is a message of a session.
type Line struct {
	Topic    string
	QoS      byte
	Payload  []byte
	Retained bool
}

var pid = regexp.MustCompile(`pid=\d+`)

// String returns the normal form of the line: JSON with sorted fields, and the same text for all object_ids and pids.
func (l Line) String() string {
	return fmt.Sprintf("q%d %s %s", l.QoS, l.Topic, normal(l.Payload))
}

func normal(payload []byte) string {
	var o any
	if json.Unmarshal(payload, &o) == nil {
		if m, ok := o.(map[string]any); ok {
			if _, ok := m["object_id"]; ok {
				m["object_id"] = "*"
			}
			if b, err := json.Marshal(m); err == nil {
				return string(b)
			}
		}
	}
	return pid.ReplaceAllString(fmt.Sprintf("%q", payload), "pid=N")
}

// Lines is a session.
type Lines []Line

// Normal returns the sorted normal forms of the lines, for comparison with another session.
func (ls Lines) Normal() []string {
	all := make([]string, len(ls))
	for i, l := range ls {
		all[i] = l.String()
	}
	slices.Sort(all)
	return all
}

// Select returns the lines that the given function accepts.
func (ls Lines) Select(want func(Line) bool) Lines {
	var some Lines
	for _, l := range ls {
		if want(l) {
			some = append(some, l)
		}
	}
	return some
}

// Below returns the lines on a topic and the topics below it.
func (ls Lines) Below(prefix string) Lines {
	return ls.Select(func(l Line) bool { return strings.HasPrefix(l.Topic, prefix+"/") || l.Topic == prefix })
}

// Without returns the lines that are neither on the topics nor below them.
func (ls Lines) Without(prefixes ...string) Lines {
	return ls.Select(func(l Line) bool {
		return !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(l.Topic, p+"/") || l.Topic == p })
	})
}

// Recorder records all messages of a broker.
type Recorder struct {
	peer *Peer

	mu      sync.Mutex
	lines   Lines
	changed chan struct{} // closed with the next line
}

// Record connects a Recorder, which subscribes to everything as an ordinary client.
func Record(url string) (*Recorder, error) {
	peer, err := Dial(PeerOptions{URL: url, ID: "edgetest-recorder", Plain: true})
	if err != nil {
		return nil, err
	}
	r := &Recorder{peer: peer, changed: make(chan struct{})}
	if err := peer.Subscribe("#", r.hear); err != nil {
		peer.Close()
		return nil, err
	}
	return r, nil
}

func (r *Recorder) hear(l Line) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, l)
	close(r.changed)
	r.changed = make(chan struct{})
}

// Lines returns the messages recorded so far.
func (r *Recorder) Lines() Lines {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}

// Wait waits until the given function has accepted n messages, and returns the last of them.
func (r *Recorder) Wait(ctx context.Context, n int, want func(Line) bool) (Line, error) {
	for {
		r.mu.Lock()
		found, changed := r.lines.Select(want), r.changed
		r.mu.Unlock()
		if len(found) >= n {
			return found[n-1], nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Line{}, fmt.Errorf("%d of %d messages arrived: %w\n%s", len(found), n, ctx.Err(), strings.Join(r.Lines().Normal(), "\n"))
		}
	}
}

// Close ends the recording.
func (r *Recorder) Close() { r.peer.Close() }

// On returns a function that accepts the messages on a topic if they contain the text.
func On(topic, text string) func(Line) bool {
	return func(l Line) bool { return l.Topic == topic && strings.Contains(string(l.Payload), text) }
}
