package manager

import "sync"

// queue is a queue that bounds the number and the total size of its items. Its channels wake waiters.
type queue[T any] struct {
	most, bytes int // bounds; an item larger than bytes fits only into an empty queue

	mu    sync.Mutex
	items []T
	sizes []int
	size  int
	more  chan struct{} // has a token while the queue may have items
	room  chan struct{} // has a token while the queue may have room
}

func newQueue[T any](most, bytes int) *queue[T] {
	return &queue[T]{most: most, bytes: bytes, more: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// put appends an item. If there is no room and evict is set, put drops the oldest items. If there is no room and evict
// is not set, put returns false.
func (q *queue[T]) put(item T, size int, evict bool) (dropped []T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.items) >= q.most || len(q.items) > 0 && q.size+size > q.bytes {
		if !evict {
			return dropped, false
		}
		dropped = append(dropped, q.items[0])
		q.shift()
	}
	q.items, q.sizes, q.size = append(q.items, item), append(q.sizes, size), q.size+size
	poke(q.more)
	return dropped, true
}

// take removes and returns the oldest item. It reports false if the queue is empty.
func (q *queue[T]) take() (item T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		return item, false
	}
	item = q.items[0]
	q.shift()
	poke(q.room)
	return item, true
}

func (q *queue[T]) shift() {
	var zero T
	q.size -= q.sizes[0]
	q.items[0] = zero
	q.items, q.sizes = q.items[1:], q.sizes[1:]
}

// empty removes and returns all items.
func (q *queue[T]) empty() []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.items
	q.items, q.sizes, q.size = nil, nil, 0
	poke(q.room)
	return all
}

func (q *queue[T]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}
