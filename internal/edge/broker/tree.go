package broker

import "strings"

// tree holds the subscriptions by the levels of their filters, and the retained messages by those of their topics. It is
// guarded by server.mu.
//
//	root ─ "a" ─┬─ "b"     subscriptions to a/b, and the message that a/b retains
//	            ├─ "+"     subscriptions to a/+
//	            └─ "#"     subscriptions to a/#
type tree struct{ root node }

type node struct {
	parent   *node
	level    string
	children map[string]*node
	subs     []*subscription
	groups   []*group
	retained *message
}

// at returns the node of a filter or topic. If there is none, it makes one or returns nil.
func (t *tree) at(path string, add bool) *node {
	n := &t.root
	for rest, more := path, true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		next := n.children[level]
		if next == nil {
			if !add {
				return nil
			}
			next = &node{parent: n, level: strings.Clone(level)} // or it would keep the whole path
			if n.children == nil {
				n.children = map[string]*node{}
			}
			n.children[next.level] = next
		}
		n = next
	}
	return n
}

// prune removes a node and its ancestors, as far as they hold nothing.
func (n *node) prune() {
	for n.parent != nil && len(n.children) == 0 && len(n.subs) == 0 && len(n.groups) == 0 && n.retained == nil {
		delete(n.parent.children, n.level)
		n = n.parent
	}
}

// match calls visit for each node whose filter matches a topic (MQTT 5.0 §4.7).
func (t *tree) match(topic string, visit func(*node)) { t.root.match(topic, true, visit) }

func (n *node) match(rest string, first bool, visit func(*node)) {
	level, rest, more := strings.Cut(rest, "/")
	system := first && strings.HasPrefix(level, "$") // wildcards at the first level do not match it (§4.7.2)
	for _, name := range [...]string{level, "+"} {
		next := n.children[name]
		if next == nil || name == "+" && system {
			continue
		}
		if more {
			next.match(rest, false, visit)
			continue
		}
		visit(next)
		if parent := next.children["#"]; parent != nil { // "a/#" also matches "a"
			visit(parent)
		}
	}
	if all := n.children["#"]; all != nil && !system {
		visit(all)
	}
}

// retained calls visit for each retained message whose topic matches a filter. visit may remove the message.
func (t *tree) retained(filter string, visit func(*node)) { t.root.matching(filter, true, visit) }

func (n *node) matching(filter string, first bool, visit func(*node)) {
	level, rest, more := strings.Cut(filter, "/")
	each := func(next *node) {
		switch {
		case more && rest == "#":
			next.below(visit)
		case more:
			next.matching(rest, false, visit)
		case next.retained != nil:
			visit(next)
		}
	}
	switch level {
	case "#", "+":
		for name, next := range n.children {
			switch {
			case first && strings.HasPrefix(name, "$"):
			case level == "#":
				next.below(visit)
			default:
				each(next)
			}
		}
	default:
		if next := n.children[level]; next != nil {
			each(next)
		}
	}
}

// below calls visit for the retained messages of a node and of all nodes below it.
func (n *node) below(visit func(*node)) {
	for _, next := range n.children {
		next.below(visit)
	}
	if n.retained != nil {
		visit(n)
	}
}
