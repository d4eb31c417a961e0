package protowit

import "google.golang.org/protobuf/reflect/protoreflect"

// WIT has no recursive types. A field that closes a cycle (its message can contain the message it stands in) carries
// the serialized message instead, as list<u8>. The rule looks at the messages alone, so that a message is mapped the
// same way wherever it is used. google.protobuf.Value is the one exception: there it is the fields of Value that are
// serialized, so that Struct and ListValue hold values.

// cycles finds the strongly connected components of the graph of messages (Tarjan's algorithm, kept small: messages
// are few). Two messages with the same component number can contain each other.
type cycles map[protoreflect.FullName]*node

type node struct {
	index, low int
	onStack    bool
	component  int
}

// raw tells whether a field whose (map value's) message is given carries serialized messages.
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

// children are the messages that a message can contain directly.
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

// contained is the message that a field holds, or the values of its map; nil: none.
func contained(fd protoreflect.FieldDescriptor) protoreflect.MessageDescriptor {
	if fd.IsMap() {
		fd = fd.MapValue()
	}
	return fd.Message()
}
