package protowit

import "google.golang.org/protobuf/reflect/protoreflect"

// WIT has no recursive types. A field that closes a cycle (its message can contain the message that has the field)
// carries the serialized message as list<u8> instead. The rule depends only on the two messages, so a message maps to
// the same type everywhere. The one exception is google.protobuf.Value: its message fields are serialized, so
// that those of Struct and ListValue need not be.

// cycles holds the strongly connected components of the graph of messages (Tarjan's algorithm, in a simple form because
// messages are few). Two messages with the same component number can contain each other.
type cycles map[protoreflect.FullName]*node

type node struct {
	index, low int
	onStack    bool
	component  int
}

// raw reports whether a field of parent carries the message child, or a map with such values, in serialized form.
func (c cycles) raw(parent, child protoreflect.MessageDescriptor) bool {
	if parent.FullName() == "google.protobuf.Value" {
		return true
	}
	c.visit(parent)
	c.visit(child)
	return parent.FullName() == child.FullName() || c[parent.FullName()].component == c[child.FullName()].component
}

func (c cycles) visit(m protoreflect.MessageDescriptor) {
	if c[m.FullName()] == nil {
		var stack []*node
		c.walk(m, &stack)
	}
}

func (c cycles) walk(m protoreflect.MessageDescriptor, stack *[]*node) *node {
	n := &node{index: len(c), low: len(c), onStack: true}
	c[m.FullName()] = n
	*stack = append(*stack, n)
	for _, child := range children(m) {
		known := c[child.FullName()]
		switch {
		case known == nil:
			n.low = min(n.low, c.walk(child, stack).low)
		case known.onStack:
			n.low = min(n.low, known.index)
		}
	}
	if n.low < n.index {
		return n
	}
	for {
		top := (*stack)[len(*stack)-1]
		*stack = (*stack)[:len(*stack)-1]
		top.onStack, top.component = false, n.index
		if top == n {
			return n
		}
	}
}

// children returns the messages that a message can contain directly.
func children(m protoreflect.MessageDescriptor) []protoreflect.MessageDescriptor {
	if m.FullName() == "google.protobuf.Value" {
		return nil
	}
	var all []protoreflect.MessageDescriptor
	for i := range m.Fields().Len() {
		if child := contained(m.Fields().Get(i)); child != nil {
			all = append(all, child)
		}
	}
	return all
}

// contained returns the message type of a field, or of a map's values, or nil.
func contained(fd protoreflect.FieldDescriptor) protoreflect.MessageDescriptor {
	if fd.IsMap() {
		fd = fd.MapValue()
	}
	return fd.Message()
}
