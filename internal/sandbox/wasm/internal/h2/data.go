package h2

import "sync"

const (
	// chunkSize is the size of the chunks that unread data is kept in, in bytes, and smallChunk that of a stream's first one
	// if it has little data.
	chunkSize  = 16 << 10
	smallChunk = 512
)

var chunks = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// unread is what a client has sent and the handler has not read.
type unread struct {
	chunks [][]byte // none is empty, but the only one
	read   int      // how much of the first one has been read
	size   int
}

// add appends data.
func (u *unread) add(data []byte) {
	u.size += len(data)
	for len(data) > 0 {
		if n := len(u.chunks) - 1; n >= 0 && len(u.chunks[n]) < cap(u.chunks[n]) {
			last := u.chunks[n]
			part := data[:min(len(data), cap(last)-len(last))]
			u.chunks[n] = append(last, part...)
			data = data[len(part):]
			continue
		}
		if len(u.chunks) == 0 && len(data) <= smallChunk {
			u.chunks = append(u.chunks, make([]byte, 0, smallChunk))
		} else {
			u.chunks = append(u.chunks, chunks.Get().(*[chunkSize]byte)[:0])
		}
	}
}

// take moves up to len(p) bytes to p, and returns how many.
func (u *unread) take(p []byte) (n int) {
	for n < len(p) && u.size > 0 {
		first := u.chunks[0]
		k := copy(p[n:], first[u.read:])
		n += k
		u.size -= k
		if u.read += k; u.read == len(first) {
			u.drop()
		}
	}
	return n
}

// drop drops the first chunk, whose bytes have been read. A small one that is the only one is kept for the next data.
func (u *unread) drop() {
	u.read = 0
	if len(u.chunks) == 1 && cap(u.chunks[0]) == smallChunk {
		u.chunks[0] = u.chunks[0][:0]
		return
	}
	release(u.chunks[0])
	u.chunks = append(u.chunks[:0], u.chunks[1:]...)
}

// discard drops everything, and returns how many bytes that were.
func (u *unread) discard() int {
	n := u.size
	for _, c := range u.chunks {
		release(c)
	}
	*u = unread{}
	return n
}

func release(chunk []byte) {
	if cap(chunk) == chunkSize {
		chunks.Put((*[chunkSize]byte)(chunk[:chunkSize]))
	}
}
