package pairs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/boltfile"
	"github.com/tripod-run/tripod/internal/component/wasi"
)

// Limits bound a store: the bytes of all pairs, and their number.
type Limits struct{ Bytes, Keys int64 }

const (
	// pairBytes is what a pair counts besides its key and its value: pages have a header for each entry.
	pairBytes = 64
	// fileRoom is how much larger than fileFactor times the limit the file can become, in bytes. The pages of bbolt are half
	// empty in the worst case, and a transaction needs room for the new pairs beside the old ones.
	fileRoom   = 64 << 20
	fileFactor = 3
	// lockTime bounds how long an operation waits for others.
	lockTime = 30 * time.Second
	// pageKeys is how many keys a call of Keys returns.
	pageKeys = 250

	fileName = "pairs.db"
	lockName = "lock"
	turnName = "turn"
)

// The buckets: pairs has a key's identifier and its value, order has the keys by their identifiers, and totals has the
// bytes and the number of all pairs. Identifiers grow, and a key keeps its own until it is deleted.
var (
	bucketPairs  = []byte("pairs")
	bucketOrder  = []byte("order")
	bucketTotals = []byte("totals")
	keyTotals    = []byte("totals")
)

var (
	errBusy    = errors.New("the store is busy")
	errDamaged = fmt.Errorf("the store is damaged: %w", errdefs.ErrDataLoss)
	errFull    = errors.New("the store is full")
	errNumber  = errors.New("the value is not an integer, or the sum is out of range")
)

// Store keeps pairs. All methods can be called concurrently, also by other processes.
type Store struct {
	dir    string
	limits Limits
	queue  *semaphore.Weighted // the operations of this Store, in order
	// damaged is the file that was found damaged, or nil. It is not read again, because bbolt keeps a mapping of such a file.
	// It stays open (O_PATH), so no new file gets its inode. The holder of queue uses it.
	damaged *os.File
}

// New returns the store in a directory, for example "/proc/self/fd/7".
func New(dir string, l Limits) *Store {
	return &Store{dir: dir, limits: l, queue: semaphore.NewWeighted(1)}
}

// lock waits until no other operation runs, at most until ctx ends. Closing the file gives the lock back. Who waits for the
// lock holds the turn, so whoever has just given the lock back cannot take it again before the others had a chance.
func lock(ctx context.Context, dir string) (*os.File, error) {
	turn, err := acquire(ctx, filepath.Join(dir, turnName))
	if err != nil {
		return nil, err
	}
	defer turn.Close()
	return acquire(ctx, filepath.Join(dir, lockName))
}

// acquire opens and locks a file.
func acquire(ctx context.Context, path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		if err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return file, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			select {
			case <-time.After(wait):
				continue
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
		file.Close()
		return nil, err
	}
}

// Own gives the directory of a store, and the store's files, to a user. Files with other links keep their owner, because
// workers can write to the directory and a link can lead to anybody's file.
func Own(dir string, uid, gid int) error {
	for _, name := range []string{".", fileName, lockName, turnName} {
		if err := own(filepath.Join(dir, name), uid, gid); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func own(path string, uid, gid int) error {
	file, err := os.OpenFile(path, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	var s unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &s); err != nil {
		return err
	}
	switch {
	case s.Uid == uint32(uid) && s.Gid == uint32(gid):
		return nil
	case s.Mode&unix.S_IFMT != unix.S_IFDIR && (s.Mode&unix.S_IFMT != unix.S_IFREG || s.Nlink != 1):
		return nil
	}
	return unix.Fchownat(int(file.Fd()), "", uid, gid, unix.AT_EMPTY_PATH)
}

// Remove removes all pairs of the store in a directory, whoever uses it. Files that it makes belong to the directory's owner.
func Remove(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, lockTime, errBusy)
	defer cancel()
	held, err := lock(ctx, dir)
	if err != nil {
		return err
	}
	defer held.Close()
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return err
	}
	if err := Own(dir, int(s.Uid), int(s.Gid)); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(dir, fileName)); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Stat returns the size of a store's file, and when it was changed. It returns os.ErrNotExist for an empty store.
func Stat(dir string) (size int64, changed time.Time, err error) {
	info, err := os.Lstat(filepath.Join(dir, fileName))
	if err != nil {
		return 0, time.Time{}, err
	}
	return info.Size(), info.ModTime(), nil
}

// view is a transaction on the store.
type view struct {
	pairs, order, totals *bbolt.Bucket
	bytes, keys          int64
}

// do carries out an operation. The error is for the guest and has no path.
func (s *Store) do(ctx context.Context, writes bool, f func(v *view) error) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lockTime, errBusy)
	defer cancel()
	if s.queue.Acquire(ctx, 1) != nil {
		return context.Cause(ctx)
	}
	defer s.queue.Release(1)
	held, err := lock(ctx, s.dir)
	if err != nil {
		return plain(err)
	}
	defer held.Close()
	path := filepath.Join(s.dir, fileName)
	if s.isDamaged(path) {
		return errDamaged
	}
	defer func() {
		if recover() != nil {
			err = errDamaged
		}
		if errors.Is(err, errDamaged) {
			s.damaged, _ = os.OpenFile(path, unix.O_PATH|unix.O_NOFOLLOW, 0)
		}
	}()
	// A file that is shorter than its pages say makes a read fail with SIGBUS, which ends the process unless it is a panic.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	db, _, err := boltfile.Open(path, boltfile.Options{Fill: fill, Shallow: true, MaxSize: s.maxSize()})
	if err != nil {
		return plain(err)
	}
	defer db.Close()
	if writes {
		return plain(db.Update(func(tx *bbolt.Tx) error {
			v, err := open(tx)
			if err == nil {
				err = f(v)
			}
			if err != nil {
				return err
			}
			return v.save(s.limits)
		}))
	}
	return plain(db.View(func(tx *bbolt.Tx) error {
		v, err := open(tx)
		if err != nil {
			return err
		}
		return f(v)
	}))
}

// isDamaged reports whether the file was found damaged and is still there.
func (s *Store) isDamaged(path string) bool {
	if s.damaged == nil {
		return false
	}
	old, err := s.damaged.Stat()
	if now, nowErr := os.Lstat(path); err == nil && nowErr == nil && os.SameFile(old, now) {
		return true
	}
	s.damaged.Close()
	s.damaged = nil
	return false
}

func (s *Store) maxSize() int {
	return int(min(s.limits.Bytes, math.MaxInt/2/fileFactor))*fileFactor + fileRoom
}

// plain returns an error without paths.
func plain(err error) error {
	if number, ok := errors.AsType[unix.Errno](err); ok {
		return fmt.Errorf("the node's disk: %w", number)
	}
	switch {
	case errors.Is(err, bbolterrors.ErrMaxSizeReached):
		return errFull
	case errdefs.IsDataLoss(err):
		return errDamaged
	}
	return err
}

func fill(tx *bbolt.Tx) error {
	for _, name := range [][]byte{bucketPairs, bucketOrder, bucketTotals} {
		if _, err := tx.CreateBucket(name); err != nil {
			return err
		}
	}
	return nil
}

func open(tx *bbolt.Tx) (*view, error) {
	v := &view{pairs: tx.Bucket(bucketPairs), order: tx.Bucket(bucketOrder), totals: tx.Bucket(bucketTotals)}
	if v.pairs == nil || v.order == nil || v.totals == nil {
		return nil, errdefs.ErrDataLoss
	}
	if t := v.totals.Get(keyTotals); len(t) == 16 {
		v.bytes, v.keys = int64(binary.BigEndian.Uint64(t)), int64(binary.BigEndian.Uint64(t[8:]))
	}
	return v, nil
}

// save stores the totals, or returns an error if they have grown beyond the limits.
func (v *view) save(l Limits) error {
	bytes, keys := int64(0), int64(0)
	if t := v.totals.Get(keyTotals); len(t) == 16 {
		bytes, keys = int64(binary.BigEndian.Uint64(t)), int64(binary.BigEndian.Uint64(t[8:]))
	}
	switch {
	case v.bytes > l.Bytes && v.bytes > bytes:
		return fmt.Errorf("%w: its pairs would need %d of %d bytes", errFull, v.bytes, l.Bytes)
	case v.keys > l.Keys && v.keys > keys:
		return fmt.Errorf("%w: it would have %d of %d keys", errFull, v.keys, l.Keys)
	}
	return v.totals.Put(keyTotals, binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, uint64(v.bytes)), uint64(v.keys)))
}

// stored returns the key of bbolt, which cannot be empty, for the key of a pair.
func stored(key string) []byte { return append([]byte{'k'}, key...) }

// get returns a value, which is valid until the end of the transaction, or nil if there is none.
func (v *view) get(key string) []byte {
	entry := v.pairs.Get(stored(key))
	if len(entry) < 8 {
		return nil
	}
	return entry[8:]
}

func (v *view) set(key string, value []byte) error {
	old := v.pairs.Get(stored(key))
	id := make([]byte, 8, 8+len(value))
	if old == nil {
		n, err := v.order.NextSequence()
		if err != nil {
			return err
		}
		binary.BigEndian.PutUint64(id, n)
		if err := v.order.Put(id, stored(key)); err != nil {
			return err
		}
		v.keys++
		v.bytes += int64(len(key) + len(value) + pairBytes)
	} else {
		copy(id, old)
		v.bytes += int64(len(value) - len(old) + len(id))
	}
	return v.pairs.Put(stored(key), append(id, value...))
}

func (v *view) delete(key string) error {
	old := v.pairs.Get(stored(key))
	if old == nil {
		return nil
	}
	v.keys--
	v.bytes -= int64(len(key) + len(old) - 8 + pairBytes)
	if err := v.order.Delete(bytes.Clone(old[:8])); err != nil {
		return err
	}
	return v.pairs.Delete(stored(key))
}

// Get implements wasi.Store.
func (s *Store) Get(ctx context.Context, hold func(n int) error, keys ...string) ([][]byte, error) {
	values := make([][]byte, len(keys))
	return values, s.do(ctx, false, func(v *view) error {
		for i, key := range keys {
			value := v.get(key)
			if value == nil {
				continue
			}
			if err := hold(len(value)); err != nil {
				return err
			}
			values[i] = append([]byte{}, value...)
		}
		return nil
	})
}

// Set implements wasi.Store: all pairs or none.
func (s *Store) Set(ctx context.Context, pairs ...wasi.Pair) error {
	return s.do(ctx, true, func(v *view) error {
		for _, p := range pairs {
			if err := v.set(p.Key, p.Value); err != nil {
				return err
			}
		}
		return nil
	})
}

// Delete implements wasi.Store: all keys or none.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	return s.do(ctx, true, func(v *view) error {
		for _, key := range keys {
			if err := v.delete(key); err != nil {
				return err
			}
		}
		return nil
	})
}

// Exists implements wasi.Store.
func (s *Store) Exists(ctx context.Context, key string) (exists bool, err error) {
	err = s.do(ctx, false, func(v *view) error {
		exists = v.get(key) != nil
		return nil
	})
	return exists, err
}

// Keys implements wasi.Store. The cursor is the identifier of the last key, so a key that exists during all calls is
// returned once, whatever happens to others.
func (s *Store) Keys(ctx context.Context, hold func(n int) error, cursor uint64) (keys []string, next uint64, err error) {
	err = s.do(ctx, false, func(v *view) error {
		c := v.order.Cursor()
		id, key := c.Seek(binary.BigEndian.AppendUint64(nil, cursor+1))
		for ; id != nil && len(keys) < pageKeys; id, key = c.Next() {
			if err := hold(len(key)); err != nil {
				return err
			}
			keys, next = append(keys, string(key[1:])), binary.BigEndian.Uint64(id)
		}
		if id == nil {
			next = 0
		}
		return nil
	})
	return keys, next, err
}

// Increment implements wasi.Store.
func (s *Store) Increment(ctx context.Context, key string, delta int64) (sum int64, err error) {
	err = s.do(ctx, true, func(v *view) error {
		old := int64(0)
		if value := v.get(key); value != nil {
			if old, err = strconv.ParseInt(string(value), 10, 64); err != nil {
				return errNumber
			}
		}
		sum = old + delta
		if (sum > old) != (delta > 0) && delta != 0 {
			return errNumber
		}
		return v.set(key, strconv.AppendInt(nil, sum, 10))
	})
	return sum, err
}

// Swap implements wasi.Store.
func (s *Store) Swap(ctx context.Context, key string, old, value []byte) (swapped bool, err error) {
	err = s.do(ctx, true, func(v *view) error {
		now := v.get(key)
		if swapped = (now == nil) == (old == nil) && bytes.Equal(now, old); !swapped {
			return nil
		}
		return v.set(key, value)
	})
	return swapped, err
}
