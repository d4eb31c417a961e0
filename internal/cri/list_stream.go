package cri

import "google.golang.org/protobuf/proto"

// chunkSize is how many bytes of items a message of a Stream* call holds, unless one item is larger: well below
// MaxMessageSize, well above what a message costs.
const chunkSize = 256 << 10

// sendInChunks sends the items in their order, each exactly once, in messages of about chunkSize bytes; size measures
// an item. There is no message without an item: an empty list is an empty stream (KEP-5825).
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

// sendMessages is sendInChunks for messages.
func sendMessages[M proto.Message](items []M, send func([]M) error) error {
	return sendInChunks(items, func(m M) int { return proto.Size(m) }, send)
}

// sendWire is sendInChunks for what is encoded already.
func sendWire(items []wireItem, send func([]wireItem) error) error {
	return sendInChunks(items, func(i wireItem) int { return len(i) }, send)
}
