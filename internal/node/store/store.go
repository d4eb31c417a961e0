package store

import (
	"crypto/rand"
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
	keyID          = []byte("id")
)

// Store is an open record file. Its methods may be called from many goroutines.
type Store struct {
	db     *bbolt.DB
	fresh  bool
	id     string
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
// else it is errdefs.ErrDataLoss, and untouched. It fails with errdefs.ErrUnavailable when another process holds the file and
// with errdefs.ErrFailedPrecondition when a later program wrote it.
func Open(path string) (*Store, error) {
	_, statErr := os.Stat(path)
	fresh := errors.Is(statErr, os.ErrNotExist)
	switch {
	case fresh:
		if err := create(path); err != nil {
			return nil, fmt.Errorf("make the record file %s: %w", path, err)
		}
	case statErr != nil:
		return nil, fmt.Errorf("look at the record file: %w", statErr)
	default:
		if err := verify(path); err != nil {
			return nil, err
		}
	}
	db, err := openFile(path, bbolt.Options{FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, fresh: fresh, queue: make(chan request, 64), closed: make(chan struct{})}
	if err := db.Update(s.prepare); err != nil {
		return nil, errors.Join(fmt.Errorf("record file %s: %w", path, err), db.Close())
	}
	s.wg.Go(s.commitLoop)
	return s, nil
}

func openFile(path string, options bbolt.Options) (*bbolt.DB, error) {
	options.Timeout = lockTimeout
	db, err := bbolt.Open(path, 0o600, &options)
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return nil, fmt.Errorf("record file %s is held by another process: %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open record file %s: %w", path, err)
	}
	return db, nil
}

// create makes a record file that is there as a whole or not at all, whenever the process or the power goes: so one that is
// empty or half was never a new node's.
func create(path string) error {
	draft := path + ".new"
	if err := os.Remove(draft); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	db, err := openFile(draft, bbolt.Options{})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		meta, err := tx.CreateBucket(bucketMeta)
		if err != nil {
			return err
		}
		return meta.Put(keyFormat, binary.BigEndian.AppendUint32(nil, Format))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		return err
	}
	if err := os.Rename(draft, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// verify looks at a file without changing it, and before anything is read that lies beyond its end, which would end the process.
func verify(path string) error {
	notWhole := func(what string) error {
		return fmt.Errorf("record file %s %s: %w", path, what, errdefs.ErrDataLoss)
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() == 0 {
		return notWhole("is empty")
	}
	db, err := openFile(path, bbolt.Options{ReadOnly: true})
	if err != nil && !errdefs.IsUnavailable(err) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	} else if err != nil {
		return err
	}
	defer db.Close()
	return db.View(func(tx *bbolt.Tx) error {
		if tx.Size() > info.Size() {
			return notWhole(fmt.Sprintf("is cut off: it has %d of %d bytes", info.Size(), tx.Size()))
		}
		if meta := tx.Bucket(bucketMeta); meta == nil || meta.Get(keyFormat) == nil {
			return notWhole("is no record of tripod's")
		}
		return nil
	})
}

// syncDir makes a new directory entry survive a loss of power.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// prepare checks the format and makes what an older program did not know.
func (s *Store) prepare(tx *bbolt.Tx) error {
	meta := tx.Bucket(bucketMeta)
	switch raw := meta.Get(keyFormat); {
	case len(raw) != 4:
		return fmt.Errorf("its format number is damaged: %w", errdefs.ErrDataLoss)
	case binary.BigEndian.Uint32(raw) > Format:
		return fmt.Errorf("format %d was written by a later tripod, this one knows %d: start the later one: %w",
			binary.BigEndian.Uint32(raw), Format, errdefs.ErrFailedPrecondition)
	}
	if _, err := tx.CreateBucketIfNotExists(bucketSequence); err != nil {
		return err
	}
	if s.id = string(meta.Get(keyID)); s.id == "" {
		s.id = rand.Text()
		return meta.Put(keyID, []byte(s.id))
	}
	return nil
}

// ID is the file's own: no other has it but its copies.
func (s *Store) ID() string { return s.id }

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
