package protowit

import "google.golang.org/protobuf/reflect/protoreflect"

// WIT has no recursive types. A field closes a cycle if the message in the field can contain the message that the field
// belongs to. Such a field carries the serialized message as list<u8> instead. The rule depends only on the two
// messages, so a message maps to the same type everywhere. The one exception is google.protobuf.Value: the message
// fields of Value are serialized, so that those of Struct and ListValue need not be serialized.

// cycles holds the strongly connected components of the graph of messages (by Tarjan's algorithm, in a simple form
// because there are few messages). Two messages with the same component number can contain each other.
type cycles map[protoreflect.FullName]*node

type node struct {
	index, low int
	onStack    bool
	component  int
}

// raw reports whether a field stays serialized. The field belongs to the parent message. Its type is the child message,
// or a map with child messages as values.
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

// contained returns the message type of a field. For a map field it returns the message type of the values. If there is
// none, it returns nil.
func contained(fd protoreflect.FieldDescriptor) protoreflect.MessageDescriptor {
	if fd.IsMap() {
		fd = fd.MapValue()
	}
	return fd.Message()
}
