package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
)

// Format is the format that this program writes. Migrations from older formats go into migrate.
const Format = 1

// lockTimeout bounds the wait for another process that has the file open.
const lockTimeout = 2 * time.Second

var (
	bucketMeta     = []byte("meta")
	bucketSequence = []byte("sequence")
	keyFormat      = []byte("format")
)

// Store is an open record file. Its methods may be called from many goroutines.
type Store struct {
	db     *bbolt.DB
	fresh  bool
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

// Open opens the record file at path and makes it when it does not exist. It fails with errdefs.ErrUnavailable when
// another process holds the file and with errdefs.ErrFailedPrecondition when a later program wrote it.
func Open(path string) (*Store, error) {
	_, statErr := os.Stat(path)
	if statErr != nil && !errors.Is(statErr, os.ErrNotExist) {
		return nil, fmt.Errorf("look at the record file: %w", statErr)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout, FreelistType: bbolt.FreelistMapType})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return nil, fmt.Errorf("record file %s is held by another process: %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open record file %s: %w", path, err)
	}
	s := &Store{db: db, fresh: statErr != nil, queue: make(chan request, 64), closed: make(chan struct{})}
	if err := db.Update(s.prepare); err != nil {
		return nil, errors.Join(fmt.Errorf("record file %s: %w", path, err), db.Close())
	}
	if s.fresh {
		if err := syncDir(filepath.Dir(path)); err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	s.wg.Go(s.commitLoop)
	return s, nil
}

// syncDir makes a new directory entry survive a loss of power.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// prepare makes the buckets of a new file and checks the format of an old one.
func (s *Store) prepare(tx *bbolt.Tx) error {
	meta, err := tx.CreateBucketIfNotExists(bucketMeta)
	if err != nil {
		return err
	}
	if _, err := tx.CreateBucketIfNotExists(bucketSequence); err != nil {
		return err
	}
	switch raw := meta.Get(keyFormat); {
	case raw == nil:
		return meta.Put(keyFormat, binary.BigEndian.AppendUint32(nil, Format))
	case len(raw) != 4:
		return fmt.Errorf("its format number is damaged: %w", errdefs.ErrDataLoss)
	case binary.BigEndian.Uint32(raw) > Format:
		return fmt.Errorf("format %d was written by a later tripod, this one knows %d: start the later one: %w",
			binary.BigEndian.Uint32(raw), Format, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Fresh reports whether Open made the file.
func (s *Store) Fresh() bool { return s.fresh }

// Close ends the store once the writes under way are done. Later writes fail with errdefs.ErrUnavailable.
func (s *Store) Close() error {
	s.once.Do(func() { close(s.closed) })
	s.wg.Wait()
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
	return s.db.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(kind))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error { return each(string(k), append([]byte(nil), v...)) })
	})
}

// Check walks the whole file and reports every damage that it finds.
func (s *Store) Check() error {
	return s.db.View(func(tx *bbolt.Tx) error {
		var errs []error
		for err := range tx.Check() {
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

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
