package broker

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	"golang.org/x/time/rate"

	"github.com/tripod-run/tripod/internal/boltfile"
)

const (
	// batchDelay is the delay of a write that nobody waits for, so that other writes can join the transaction. Most
	// messages are acknowledged within that time and never reach the disk.
	batchDelay = 25 * time.Millisecond
	// retryStore is the delay before a failed write is tried again, unless there are further changes: with these it is tried
	// after minRetry, or later if attempts take long.
	retryStore, minRetry = time.Second, 20 * time.Millisecond
	// maxBatch is the number of bytes in a batch above which publishers wait until the batch is written.
	maxBatch = 4 << 20
)

var bucket = []byte("mqtt/v2")

// store is a write-behind map on disk: keys change in memory, and one transaction writes many changes.
//
//	put, del ──▶ dirty ──▶ batch ──bbolt, fsync──▶ disk
//	                └─ needed, waitFor: until the urgent changes are on the disk
type store struct {
	db  *bbolt.DB // nil: all methods do nothing
	log *slog.Logger

	group sync.RWMutex // read-locked during a group of changes, locked while a batch is cut off

	mu      sync.Mutex
	dirty   map[string][]byte // nil value: delete
	size    int               // bytes of the values in dirty, including those that were replaced
	disk    map[string]struct{}
	batch   uint64 // number of the batch that is being gathered
	done    uint64 // number of the last batch that was written, or whose write failed
	urgent  uint64 // number of the last batch with an urgent change
	written *sync.Cond
	closed  bool

	kick, end chan struct{}
	ended     chan struct{}
	errors    atomic.Uint64
}

func openStore(path string, log *slog.Logger) (*store, error) {
	s := &store{log: log, dirty: map[string][]byte{}, disk: map[string]struct{}{}, batch: 1, kick: make(chan struct{}, 1),
		end: make(chan struct{}), ended: make(chan struct{})}
	s.written = sync.NewCond(&s.mu)
	if path == "" {
		close(s.ended)
		return s, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	db, _, err := boltfile.Open(path, boltfile.Options{Fill: makeBucket, Recognize: recognize})
	if errdefs.IsDataLoss(err) {
		return nil, fmt.Errorf("broker: %w; nothing was changed. Restore a copy of the file, or remove it: then retained messages "+
			"and the messages queued for disconnected clients are lost", err)
	}
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		if tx.Bucket(bucket1) != nil {
			return convert(tx, time.Now())
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("broker: %s: conversion of an earlier version's file: %w", path, err), db.Close())
	}
	err = db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucket).ForEach(func(k, _ []byte) error {
			s.disk[string(k)] = struct{}{}
			return nil
		})
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("broker: %s: %w", path, err), db.Close())
	}
	s.db = db
	go s.run()
	return s, nil
}

func makeBucket(tx *bbolt.Tx) error { _, err := tx.CreateBucket(bucket); return err }

func recognize(tx *bbolt.Tx) error {
	if tx.Bucket(bucket) == nil && tx.Bucket(bucket1) == nil {
		return errors.New("is not a broker's")
	}
	return nil
}

// begin starts a group of changes. All changes between begin and the returned function reach the disk in one
// transaction. The caller must not wait for the store in between.
func (s *store) begin() (end func()) {
	s.group.RLock()
	return s.group.RUnlock
}

// put sets a key. If urgent is set, needed includes the change.
func (s *store) put(key string, value []byte, urgent bool) { s.set(key, value, urgent) }

// del removes a key.
func (s *store) del(key string, urgent bool) { s.set(key, nil, urgent) }

func (s *store) set(key string, value []byte, urgent bool) {
	if s.db == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, stored := s.disk[key]
	if value == nil && !stored {
		delete(s.dirty, key)
		return
	}
	s.dirty[key] = value
	s.size += len(value)
	if urgent {
		s.urgent = s.batch
	}
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// needed returns the number of the last batch with an urgent change, for waitFor. It returns 0 if there is nothing to
// wait for.
func (s *store) needed() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.urgent <= s.done || s.closed {
		return 0
	}
	return s.urgent
}

// isWritten reports whether waitFor would return at once.
func (s *store) isWritten(batch uint64) bool {
	if batch == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done >= batch || s.closed
}

// waitFor waits until a batch is on the disk, or writing it has failed.
func (s *store) waitFor(batch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.done < batch && !s.closed {
		s.written.Wait()
	}
}

// throttle waits until the batch is written if it has become large.
func (s *store) throttle() {
	s.mu.Lock()
	large, batch := s.size > maxBatch, s.batch
	s.mu.Unlock()
	if large {
		s.waitFor(batch)
	}
}

// run writes one batch after another.
func (s *store) run() {
	defer close(s.ended)
	complain := rate.Sometimes{First: 1, Interval: 10 * time.Second}
	var retry <-chan time.Time
	for last := false; !last; {
		select {
		case <-s.kick:
			s.linger()
		case <-retry:
		case <-s.end:
			last = true
		}
		began := time.Now()
		err := s.write()
		if retry = nil; err == nil {
			continue
		}
		complain.Do(func() { s.log.Error("broker: sessions and retained messages cannot be stored", "err", err) })
		retry = time.After(retryStore)
		select {
		case <-time.After(min(max(10*time.Since(began), minRetry), retryStore)):
		case <-s.end:
			last = true
		}
	}
}

// linger lets a batch without urgent changes grow.
func (s *store) linger() {
	for until := time.Now().Add(batchDelay); time.Now().Before(until); {
		s.mu.Lock()
		urgent := s.urgent > s.done
		s.mu.Unlock()
		if urgent {
			return
		}
		select {
		case <-s.kick:
		case <-time.After(time.Until(until)):
		case <-s.end:
			return
		}
	}
}

// write writes all changes in one transaction.
func (s *store) write() error {
	s.group.Lock()
	s.mu.Lock()
	changes, number := s.dirty, s.batch
	s.dirty, s.size, s.batch = map[string][]byte{}, 0, s.batch+1
	for key, value := range changes { // set before the transaction, so that a del during the transaction reaches the disk
		if value != nil {
			s.disk[key] = struct{}{}
		}
	}
	s.mu.Unlock()
	s.group.Unlock()
	var err error
	if len(changes) > 0 {
		err = s.db.Update(func(tx *bbolt.Tx) error {
			b := tx.Bucket(bucket)
			for key, value := range changes {
				if value == nil {
					if err := b.Delete([]byte(key)); err != nil {
						return err
					}
				} else if err := b.Put([]byte(key), value); err != nil {
					return err
				}
			}
			return nil
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, value := range changes {
		if _, newer := s.dirty[key]; err != nil && !newer {
			s.dirty[key] = value // for the next attempt
			s.size += len(value)
		} else if err == nil && value == nil && !newer {
			delete(s.disk, key)
		}
	}
	if err != nil {
		s.forget(changes)
	}
	if err != nil {
		s.errors.Add(1) // before waiters wake up, because they may read the counter
	}
	s.done = number // after an error too: the broker continues with its state in memory
	s.written.Broadcast()
	return err
}

// forget corrects what is known of the disk after a write has failed. A key that was meanwhile removed, and is not on the
// disk, needs no further attempt; otherwise such keys would pile up while the disk is full. s.mu is locked.
func (s *store) forget(failed map[string][]byte) {
	_ = s.db.View(func(tx *bbolt.Tx) error { // fails only if the file is closed
		b := tx.Bucket(bucket)
		for key := range failed {
			if b.Get([]byte(key)) != nil {
				continue
			}
			delete(s.disk, key)
			if s.dirty[key] == nil {
				delete(s.dirty, key)
			}
		}
		return nil
	})
}

// each calls visit for every key with a prefix, in order.
func (s *store) each(prefix string, visit func(key string, value []byte) error) error {
	if s.db == nil {
		return nil
	}
	return s.db.View(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucket).Cursor()
		for k, v := c.Seek([]byte(prefix)); k != nil && len(k) >= len(prefix) && string(k[:len(prefix)]) == prefix; k, v = c.Next() {
			if err := visit(string(k[len(prefix):]), v); err != nil {
				return err
			}
		}
		return nil
	})
}

// close writes the remaining changes and closes the file.
func (s *store) close() error {
	if s.db == nil {
		return nil
	}
	close(s.end)
	<-s.ended
	s.mu.Lock()
	s.closed = true
	s.written.Broadcast()
	s.mu.Unlock()
	return s.db.Close()
}
