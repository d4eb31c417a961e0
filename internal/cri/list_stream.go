package cri

import "google.golang.org/protobuf/proto"

// chunkSize limits the bytes of items in a message of a Stream* call, unless one item is larger. It is well below
// MaxMessageSize and large enough to make the cost per message negligible.
const chunkSize = 256 << 10

// sendInChunks sends the items in order, in messages of about chunkSize bytes; size measures an item. It sends no empty
// message: an empty list is an empty stream (KEP-5825).
func sendInChunks[I any](items []I, size func(I) int, send func([]I) error) error {
	start, pending := 0, 0
	for i, item := range items {
		n := size(item)
		if i > start && pending+n > chunkSize {
			if err := send(items[start:i]); err != nil {
				return err
			}
			start, pending = i, 0
		}
		pending += n
	}
	if start == len(items) {
		return nil
	}
	return send(items[start:])
}

func sendMessages[M proto.Message](items []M, send func([]M) error) error {
	return sendInChunks(items, func(m M) int { return proto.Size(m) }, send)
}

// sendWire is like sendInChunks, for encoded items.
func sendWire(items []wireItem, send func([]wireItem) error) error {
	return sendInChunks(items, func(i wireItem) int { return len(i) }, send)
}
