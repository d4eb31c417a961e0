package cri

import "google.golang.org/protobuf/proto"

// chunkSize is how many bytes of items a message of a Stream* call holds, unless one item is larger: well below
// MaxMessageSize, well above what a message costs.
const chunkSize = 256 << 10

// sendInChunks sends the items in their order, each exactly once, in messages of about chunkSize bytes. There is no
// message without an item: an empty list is an empty stream (KEP-5825).
func sendInChunks[M proto.Message](items []M, send func([]M) error) error {
	start, size := 0, 0
	for i, item := range items {
		n := proto.Size(item)
		if i > start && size+n > chunkSize {
			if err := send(items[start:i]); err != nil {
				return err
			}
			start, size = i, 0
		}
		size += n
	}
	if start == len(items) {
		return nil
	}
	return send(items[start:])
}
