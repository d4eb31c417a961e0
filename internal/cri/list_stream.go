package cri

import "google.golang.org/protobuf/proto"

// chunkSize is how many bytes of items a message of a Stream* call holds, unless one item is larger. It is well below
// MaxMessageSize and large enough to make the cost per message negligible.
const chunkSize = 256 << 10

// sendInChunks sends the items in order, in messages of about chunkSize bytes; size measures an item. It sends no empty
// message: an empty list is an empty stream (KEP-5825).
func sendInChunks[I any](items []I, size func(I) int, send func([]I) error) error {
	start, held := 0, 0
	for i, item := range items {
		n := size(item)
		if i > start && held+n > chunkSize {
			if err := send(items[start:i]); err != nil {
				return err
			}
			start, held = i, 0
		}
		held += n
	}
	if start == len(items) {
		return nil
	}
	return send(items[start:])
}

func sendMessages[M proto.Message](items []M, send func([]M) error) error {
	return sendInChunks(items, func(m M) int { return proto.Size(m) }, send)
}

// sendWire is sendInChunks for encoded items.
func sendWire(items []wireItem, send func([]wireItem) error) error {
	return sendInChunks(items, func(i wireItem) int { return len(i) }, send)
}
