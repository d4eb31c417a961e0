package store

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/boltfile"
	"github.com/tripod-run/tripod/internal/synced"
)

// Format is the file format that this program writes.
const Format = 1

var (
	bucketMeta     = []byte("meta")
	bucketSequence = []byte("sequence")
	keyFormat      = []byte("format")
	keyID          = []byte("id")
)

// Store is an open record file. Its methods are safe for concurrent use.
type Store struct {
	path  string
	fresh bool
	id    string

	// mu is write-locked while db is reopened. db is nil until the file can be created.
	mu       sync.RWMutex
	db       *bbolt.DB
	readOnly bool

	drafts drafts
	// unwatch ends the count of synced writes; nil without a file.
	unwatch func()

	queue  chan request
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup
}

type request struct {
	apply func(*bbolt.Tx) error
	done  chan error
}

// Open opens the record file at path, or creates it. An existing file must be complete and ours; otherwise Open leaves
// it unchanged and returns errdefs.ErrDataLoss. It returns errdefs.ErrUnavailable if another process holds the file,
// and errdefs.ErrFailedPrecondition if a later version of tripod wrote it.
//
// On a read-only file system Open succeeds, and the records can be read. Writes fail until the file system is writable.
func Open(path string) (*Store, error) {
	s := &Store{path: path, queue: make(chan request, 64), closed: make(chan struct{})}
	err := s.open(false)
	if errors.Is(err, unix.EROFS) {
		err = s.open(true)
	}
	if err != nil {
		return nil, fmt.Errorf("record file: %w", err)
	}
	s.wg.Go(s.commitLoop)
	return s, nil
}

// open opens the file. If readOnly is set, a missing file counts as a file without records.
func (s *Store) open(readOnly bool) error {
	db, fresh, err := boltfile.Open(s.path, boltfile.Options{Fill: fill, Recognize: recognize, Shallow: true, ReadOnly: readOnly})
	if readOnly && errors.Is(err, os.ErrNotExist) {
		s.readOnly, s.fresh = true, true
		return nil
	}
	if err != nil {
		return err
	}
	if readOnly {
		err = db.View(s.identify)
	} else {
		err = db.Update(s.prepare)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", s.path, err), db.Close())
	}
	s.db, s.readOnly, s.fresh = db, readOnly, s.fresh || fresh
	s.unwatch = synced.Watch(synced.Transactions(db))
	return nil
}

func fill(tx *bbolt.Tx) error {
	meta, err := tx.CreateBucket(bucketMeta)
	if err != nil {
		return err
	}
	return meta.Put(keyFormat, binary.BigEndian.AppendUint32(nil, Format))
}

func recognize(tx *bbolt.Tx) error {
	if meta := tx.Bucket(bucketMeta); meta == nil || meta.Get(keyFormat) == nil {
		return errors.New("not a record file of tripod")
	}
	return nil
}

// identify checks the format number and reads the ID.
func (s *Store) identify(tx *bbolt.Tx) error {
	meta := tx.Bucket(bucketMeta)
	switch raw := meta.Get(keyFormat); {
	case len(raw) != 4:
		return fmt.Errorf("the format number is damaged: %w", errdefs.ErrDataLoss)
	case binary.BigEndian.Uint32(raw) > Format:
		return fmt.Errorf("format %d is later than %d: start the version of tripod that wrote it: %w",
			binary.BigEndian.Uint32(raw), Format, errdefs.ErrFailedPrecondition)
	}
	s.id = string(meta.Get(keyID))
	return nil
}

// prepare calls identify, and adds the bucket or the ID if an older version left it out.
func (s *Store) prepare(tx *bbolt.Tx) error {
	if err := s.identify(tx); err != nil {
		return err
	}
	if _, err := tx.CreateBucketIfNotExists(bucketSequence); err != nil {
		return err
	}
	if s.id != "" {
		return nil
	}
	s.id = rand.Text()
	return tx.Bucket(bucketMeta).Put(keyID, []byte(s.id))
}

// Err returns errdefs.ErrUnavailable if records cannot be written now, or nil. It does not write.
func (s *Store) Err() error {
	err := unix.Access(s.path, unix.W_OK)
	if errors.Is(err, unix.ENOENT) && s.isReadOnly() {
		err = unix.Access(filepath.Dir(s.path), unix.W_OK) // the file does not exist yet
	}
	if err != nil {
		return fmt.Errorf("the record file %s cannot be written: %w: %w", s.path, err, errdefs.ErrUnavailable)
	}
	return nil
}

func (s *Store) isReadOnly() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.readOnly
}

// makeWritable reopens a file that was opened read-only, if it can now be written.
func (s *Store) makeWritable() error {
	if !s.isReadOnly() {
		return nil
	}
	if err := s.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.db != nil {
		s.unwatch()
		if err := s.db.Close(); err != nil {
			return err
		}
		s.db = nil
	}
	if err := s.open(false); err != nil {
		return errors.Join(err, s.open(true))
	}
	return nil
}

func (s *Store) view(read func(*bbolt.Tx) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.db == nil {
		return nil
	}
	return s.db.View(read)
}

// ID returns the file's unique ID; only copies of the file share it.
func (s *Store) ID() string { return s.id }

// Fresh reports whether Open created the file.
func (s *Store) Fresh() bool { return s.fresh }

// Close closes the store once the writes under way have ended. Later writes fail with errdefs.ErrUnavailable.
func (s *Store) Close() error {
	s.once.Do(func() {
		s.settleDrafts()
		close(s.closed)
	})
	s.wg.Wait()
	if s.db == nil {
		return nil
	}
	s.unwatch()
	return s.db.Close()
}

// Put writes value under key. It returns once the value is on disk.
func (s *Store) Put(kind, key string, value []byte) error {
	err := s.submit(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte(kind))
		if err != nil {
			return err
		}
		return b.Put([]byte(key), value)
	})
	if err == nil {
		s.drafts.remove(kind, key)
	}
	return err
}

// Delete removes key. It succeeds if the key is missing.
func (s *Store) Delete(kind, key string) error {
	if hash, err := s.hash(kind, key); err == nil && hash == hashOf(nil) {
		s.drafts.remove(kind, key) // it was never more than a draft
		return nil
	}
	err := s.submit(func(tx *bbolt.Tx) error {
		if b := tx.Bucket([]byte(kind)); b != nil {
			return b.Delete([]byte(key))
		}
		return nil
	})
	if err == nil {
		s.drafts.remove(kind, key)
	}
	return err
}

// Update writes and removes several records of one kind in one transaction. It returns once they are on disk.
func (s *Store) Update(kind string, put map[string][]byte, remove []string) error {
	return s.submit(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte(kind))
		if err != nil {
			return err
		}
		for key, value := range put {
			if err := b.Put([]byte(key), value); err != nil {
				return err
			}
		}
		for _, key := range remove {
			if err := b.Delete([]byte(key)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Next returns the next number of the named sequence: 0, 1, 2 … No number repeats during the life of the file.
func (s *Store) Next(name string) (uint64, error) {
	var n uint64
	err := s.submit(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketSequence)
		n = 0
		if raw := b.Get([]byte(name)); len(raw) == 8 {
			n = binary.BigEndian.Uint64(raw)
		}
		return b.Put([]byte(name), binary.BigEndian.AppendUint64(nil, n+1))
	})
	return n, err
}

// All calls the function with every record of the kind. The function can keep the slices, and it can use the store and
// wait for others that do: no transaction is open while it runs. (A write that enlarges the file waits for all reading
// transactions, and new ones wait for that write.)
func (s *Store) All(kind string, each func(key string, value []byte) error) error {
	all, err := s.drafts.list(s.id)
	if err != nil {
		return err
	}
	pending := map[string]draft{}
	for _, d := range all {
		if d.kind == kind {
			pending[d.key] = d
		}
	}
	type record struct {
		key   string
		value []byte
	}
	var records []record
	err = s.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(kind))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error {
			records = append(records, record{string(k), bytes.Clone(v)})
			return nil
		})
	})
	if err != nil {
		return err
	}
	for _, r := range records {
		d, drafted := pending[r.key]
		delete(pending, r.key)
		if drafted && d.base == hashOf(r.value) {
			r.value = d.value
		}
		if err := each(r.key, r.value); err != nil {
			return err
		}
	}
	for key, d := range pending {
		if d.base != hashOf(nil) {
			continue // its record was deleted
		}
		if err := each(key, d.value); err != nil {
			return err
		}
	}
	return nil
}

// Check verifies the whole file.
func (s *Store) Check() error { return s.view(boltfile.Check) }

func (s *Store) submit(apply func(*bbolt.Tx) error) error {
	r := request{apply: apply, done: make(chan error, 1)}
	select {
	case s.queue <- r:
	case <-s.closed:
		return fmt.Errorf("the record file is closed: %w", errdefs.ErrUnavailable)
	}
	select {
	case err := <-r.done:
		return err
	case <-s.closed:
		s.wg.Wait() // the request may have been taken before commitLoop ended
		select {
		case err := <-r.done:
			return err
		default:
			return fmt.Errorf("the record file is closed: %w", errdefs.ErrUnavailable)
		}
	}
}

// commitLoop collects the requests that arrive during a transaction, and writes all of them in the next transaction.
func (s *Store) commitLoop() {
	for {
		select {
		case r := <-s.queue:
			s.commit(s.drain([]request{r}))
		case <-s.closed:
			if rest := s.drain(nil); len(rest) > 0 {
				s.commit(rest)
			}
			return
		}
	}
}

func (s *Store) drain(batch []request) []request {
	for {
		select {
		case r := <-s.queue:
			batch = append(batch, r)
		default:
			return batch
		}
	}
}

// commit writes a batch of requests in one transaction. If the transaction fails, commit writes each request alone, so
// that one bad request does not make the others fail.
func (s *Store) commit(batch []request) {
	if err := s.makeWritable(); err != nil {
		for _, r := range batch {
			r.done <- wrapWrite(err)
		}
		return
	}
	err := s.db.Update(func(tx *bbolt.Tx) error {
		for _, r := range batch {
			if err := r.apply(tx); err != nil {
				return err
			}
		}
		return nil
	})
	for _, r := range batch {
		if err != nil && len(batch) > 1 {
			r.done <- wrapWrite(s.db.Update(r.apply))
		} else {
			r.done <- wrapWrite(err)
		}
	}
}

func wrapWrite(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("write the record file: %w", err)
}
