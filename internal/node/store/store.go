package store

import (
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
)

// Format is the format that this program writes. Migrations from older formats go into migrate.
const Format = 1

var (
	bucketMeta     = []byte("meta")
	bucketSequence = []byte("sequence")
	keyFormat      = []byte("format")
	keyID          = []byte("id")
)

// Store is an open record file. Its methods may be called from many goroutines.
type Store struct {
	path  string
	fresh bool
	id    string

	// mu is held for writing while db is opened again. db is nil for a file that is to be made once that is possible.
	mu       sync.RWMutex
	db       *bbolt.DB
	readOnly bool

	queue  chan request
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup
}

// request is one write waiting for the committer.
type request struct {
	apply func(*bbolt.Tx) error
	done  chan error
}

// Open opens the record file at path and makes it when it does not exist. A file that is there must be whole, and one of ours:
// otherwise it is errdefs.ErrDataLoss, and untouched. It fails with errdefs.ErrUnavailable when another process holds the file and
// with errdefs.ErrFailedPrecondition when a later program wrote it.
//
// On a file system that is read-only the record can be read; writes fail, until one finds that it can be written again.
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

// open opens the file, for reading only if so told: one that is not there then has no records.
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
		return errors.New("is no record of tripod's")
	}
	return nil
}

// identify checks the format and reads the ID.
func (s *Store) identify(tx *bbolt.Tx) error {
	meta := tx.Bucket(bucketMeta)
	switch raw := meta.Get(keyFormat); {
	case len(raw) != 4:
		return fmt.Errorf("its format number is damaged: %w", errdefs.ErrDataLoss)
	case binary.BigEndian.Uint32(raw) > Format:
		return fmt.Errorf("format %d was written by a later tripod, this one knows %d: start the later one: %w",
			binary.BigEndian.Uint32(raw), Format, errdefs.ErrFailedPrecondition)
	}
	s.id = string(meta.Get(keyID))
	return nil
}

// prepare is identify, and makes what an older program did not know.
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

// Err says why records cannot be written now, without writing: errdefs.ErrUnavailable, or nil.
func (s *Store) Err() error {
	err := unix.Access(s.path, unix.W_OK)
	if errors.Is(err, unix.ENOENT) && s.isReadOnly() {
		err = unix.Access(filepath.Dir(s.path), unix.W_OK) // it is to be made yet
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

// makeWritable opens a file again that could only be read, once it can be written.
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

// view reads in one transaction.
func (s *Store) view(read func(*bbolt.Tx) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.db == nil {
		return nil
	}
	return s.db.View(read)
}

// ID is the file's own: no other has it but its copies.
func (s *Store) ID() string { return s.id }

// Fresh reports whether Open made the file.
func (s *Store) Fresh() bool { return s.fresh }

// Close ends the store once the writes under way are done. Later writes fail with errdefs.ErrUnavailable.
func (s *Store) Close() error {
	s.once.Do(func() { close(s.closed) })
	s.wg.Wait()
	if s.db == nil {
		return nil
	}
	return s.db.Close()
}

// Put writes value under key. It returns when the value is on the disk.
func (s *Store) Put(kind, key string, value []byte) error {
	return s.submit(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte(kind))
		if err != nil {
			return err
		}
		return b.Put([]byte(key), value)
	})
}

// Delete removes key. A key that is not there is a success.
func (s *Store) Delete(kind, key string) error {
	return s.submit(func(tx *bbolt.Tx) error {
		if b := tx.Bucket([]byte(kind)); b != nil {
			return b.Delete([]byte(key))
		}
		return nil
	})
}

// Next returns the next number of the sequence called name: 0, 1, 2 … It never repeats over the life of the file.
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

// All calls each for every record of kind, in the order of the keys. The slices are each's to keep.
func (s *Store) All(kind string, each func(key string, value []byte) error) error {
	return s.view(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(kind))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error { return each(string(k), append([]byte(nil), v...)) })
	})
}

// Check walks the whole file and reports damage.
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
		s.wg.Wait() // the committer may have taken it before it ended
		select {
		case err := <-r.done:
			return err
		default:
			return fmt.Errorf("the record file is closed: %w", errdefs.ErrUnavailable)
		}
	}
}

// commitLoop takes what has queued up while the last transaction was written and writes it as one.
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

// commit writes batch in one transaction; when that fails, each request alone, so that one bad record does not
// take its neighbours with it.
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
