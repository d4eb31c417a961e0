package cri

import "google.golang.org/protobuf/proto"

// chunkSize limits the total size of the items in one message of a Stream* call, in bytes. Only a message with a single
// larger item exceeds it. The limit is well below MaxMessageSize and large enough to make the cost per message
// negligible.
const chunkSize = 256 << 10

// sendInChunks sends the items in order, in messages with at most chunkSize bytes of items. The second parameter is a
// function that returns an item's size. For an empty list, sendInChunks sends no message (KEP-5825).
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
