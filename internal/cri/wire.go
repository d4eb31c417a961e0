package cri

import (
	"fmt"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Clients list pods and containers every second, and in that time few of a thousand items change. Nearly the whole cost
// of such a call is the encoding of labels and annotations. Therefore each snapshot is encoded once, and a list is
// assembled from the encoded items.
//
// This needs no codec of our own, because protobuf writes a message's unknown fields unchanged. The encoded items
// become an unknown field with the number 1. Every list response, unary or streamed, holds its items in a field with
// that number, so the client sees an ordinary field.

// itemsField is the number of the field that holds the items. It is the same in every list response.
const itemsField = 1

// wireItem is one encoded item of a response: tag, length, message.
type wireItem []byte

// wireMemo caches the encoded snapshots of the last full list, and no other snapshots. It takes no lock.
type wireMemo[S any] struct {
	last atomic.Pointer[map[*S]wireItem]
}

// items returns the encoded snapshots, from the cache where possible. The list is cached only if whole is set, which
// means that the list is complete.
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

// encodeItem encodes a message as an element of field 1.
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

// withItems puts the items into field 1 of a response.
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

// checkFits rejects a list that does not fit into one message. The second argument is the name of the streaming call,
// which has no such limit.
func checkFits(items []wireItem, streamed string) error {
	if size := wireSize(items); size > MaxMessageSize {
		return fmt.Errorf("the list of %d items has %d bytes, and a message holds %d: call %s or set a filter: %w",
			len(items), size, MaxMessageSize, streamed, errdefs.ErrResourceExhausted)
	}
	return nil
}
