package cri

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/node"
)

// Clients list pods and containers every second, and in that time few of a thousand items change. Nearly the whole cost
// of such a call is the encoding of labels and annotations. Therefore each snapshot is encoded once, and a list is
// assembled from the encoded items. A full list is selected only if a pod has changed since the last one.
//
// This needs no codec of our own, because protobuf writes a message's unknown fields unchanged. The encoded items
// become an unknown field with the number 1. Every list response, unary or streamed, holds its items in a field with
// that number, so the client sees an ordinary field.

// itemsField is the number of the field that holds the items. It is the same in every list response.
const itemsField = 1

// wireItem is one encoded item of a response: tag, length, message.
type wireItem []byte

// wireMemo caches the last full list with its encoded snapshots, and no other snapshots. It takes no lock.
type wireMemo[S any] struct {
	last atomic.Pointer[wireList[S]]
}

// wireList is a full list.
type wireList[S any] struct {
	source wireSource
	items  []wireItem
	known  map[*S]wireItem // the items by their snapshots
}

// wireSource is what a full list is made of: the node's pods at a time, all or without those of edge modules.
type wireSource struct {
	pods []*node.Pod
	all  bool
}

// unchanged returns the last full list if the same source would give the same list again. Then nothing but the pods'
// identity needs to be looked at.
func (m *wireMemo[S]) unchanged(source wireSource) ([]wireItem, bool) {
	last := m.last.Load()
	if last == nil || last.source.all != source.all || !slices.Equal(last.source.pods, source.pods) {
		return nil, false
	}
	return last.items, true
}

// items returns the encoded snapshots, from the cache where possible.
func (m *wireMemo[S]) items(snapshots []*S, message func(*S) proto.Message) ([]wireItem, error) {
	var known map[*S]wireItem
	if last := m.last.Load(); last != nil {
		known = last.known
	}
	items := make([]wireItem, len(snapshots))
	for i, s := range snapshots {
		item, ok := known[s]
		if !ok {
			var err error
			if item, err = encodeItem(message(s)); err != nil {
				return nil, err
			}
		}
		items[i] = item
	}
	return items, nil
}

// remember caches a full list. The source must have been taken before the snapshots, so that the list is not older.
func (m *wireMemo[S]) remember(source wireSource, snapshots []*S, items []wireItem) {
	next := &wireList[S]{source: source, items: items, known: make(map[*S]wireItem, len(snapshots))}
	for i, s := range snapshots {
		next.known[s] = items[i]
	}
	m.last.Store(next)
}

// wireItems returns the encoded items of a list. The function selected returns the snapshots of the list, which is full if
// the request has no filter.
func wireItems[S any](ctx context.Context, s *Server, memo *wireMemo[S], full bool, selected func() ([]*S, error),
	message func(*S) proto.Message) ([]wireItem, error) {
	source := wireSource{all: listsAll(ctx)}
	if full {
		source.pods = s.node.Pods()
		if items, ok := memo.unchanged(source); ok {
			return items, nil
		}
	}
	snapshots, err := selected()
	if err != nil {
		return nil, err
	}
	items, err := memo.items(snapshots, message)
	if err == nil && full {
		memo.remember(source, snapshots, items)
	}
	return items, err
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
