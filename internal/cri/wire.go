package cri

import (
	"fmt"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Lists of pods and containers are asked for every second, and of a thousand items few have changed since. Encoding
// their labels and annotations is nearly all that such a call costs, so each snapshot is encoded once: a list is put
// together from the items' wire forms.
//
// This works without a codec of our own because protobuf writes a message's unknown fields as they are, and because
// the items are field 1 of the unary response as of the streamed one. For the client nothing is unknown.

// itemsField is the number of the repeated field that holds the items, in every list response used here.
const itemsField = 1

// wireItem is one item as it stands in a response: tag, length, message.
type wireItem []byte

// wireMemo remembers the wire forms of the snapshots of the last whole list. It holds nothing that cannot be made
// again, takes no lock, and drops what was not in the list.
type wireMemo[S any] struct {
	last atomic.Pointer[map[*S]wireItem]
}

// items encodes snapshots by message, or takes their wire forms from the last whole list. whole says that there are no
// others, so that they are worth remembering.
func (m *wireMemo[S]) items(snapshots []*S, whole bool, message func(*S) proto.Message) ([]wireItem, error) {
	var known map[*S]wireItem
	if last := m.last.Load(); last != nil {
		known = *last
	}
	items, hits := make([]wireItem, len(snapshots)), 0
	for i, s := range snapshots {
		if item, ok := known[s]; ok {
			items[i] = item
			hits++
			continue
		}
		item, err := encodeItem(message(s))
		if err != nil {
			return nil, err
		}
		items[i] = item
	}
	if whole && (hits < len(snapshots) || len(known) > len(snapshots)) {
		m.remember(snapshots, items)
	}
	return items, nil
}

func (m *wireMemo[S]) remember(snapshots []*S, items []wireItem) {
	next := make(map[*S]wireItem, len(snapshots))
	for i, s := range snapshots {
		next[s] = items[i]
	}
	m.last.Store(&next)
}

// encodeItem writes message as an element of field 1.
func encodeItem(message proto.Message) (wireItem, error) {
	size := proto.Size(message)
	item := make([]byte, 0, protowire.SizeTag(itemsField)+protowire.SizeBytes(size))
	item = protowire.AppendTag(item, itemsField, protowire.BytesType)
	item = protowire.AppendVarint(item, uint64(size))
	item, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(item, message)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", message, err)
	}
	return item, nil
}

// withItems puts items into a response, whose field 1 they are.
func withItems[R proto.Message](response R, items []wireItem) R {
	raw := make([]byte, 0, wireSize(items))
	for _, item := range items {
		raw = append(raw, item...)
	}
	response.ProtoReflect().SetUnknown(raw)
	return response
}

func wireSize(items []wireItem) int {
	size := 0
	for _, item := range items {
		size += len(item)
	}
	return size
}

// checkFits refuses a list that one message cannot hold; streamed is the call that has no such limit.
func checkFits(items []wireItem, streamed string) error {
	if size := wireSize(items); size > MaxMessageSize {
		return fmt.Errorf("the list of %d items has %d bytes, a message holds %d: call %s or set a filter: %w",
			len(items), size, MaxMessageSize, streamed, errdefs.ErrResourceExhausted)
	}
	return nil
}
