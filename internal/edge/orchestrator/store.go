package orchestrator

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"

	"github.com/tripod-run/tripod/internal/boltfile"
)

// format is the version of the file format that this program writes.
const format = 1

var (
	bucketMeta = []byte("meta")
	keyFormat  = []byte("format")
)

// store keeps the records in a bbolt file. Each kind has a bucket, whose keys are uuids.
type store struct{ db *bbolt.DB }

// openStore opens or creates the file. If the file is damaged or foreign, openStore returns errdefs.ErrDataLoss; if
// another process has the file open, ErrUnavailable; if a later version wrote it, ErrFailedPrecondition. In these cases
// the file does not change.
func openStore(path string) (*store, error) {
	db, _, err := boltfile.Open(path, boltfile.Options{Fill: prepare, Recognize: recognize})
	if errdefs.IsDataLoss(err) {
		return nil, fmt.Errorf("the orchestrator's record: %w; nothing was changed. Restore a backup and start again. "+
			"Without one, stop the running modules on their nodes, then remove the file", err)
	}
	if err != nil {
		return nil, fmt.Errorf("the orchestrator's record: %w", err)
	}
	if err := db.Update(prepare); err != nil {
		return nil, errors.Join(fmt.Errorf("the orchestrator's record %s: %w", path, err), db.Close())
	}
	return &store{db: db}, nil
}

func recognize(tx *bbolt.Tx) error {
	if meta := tx.Bucket(bucketMeta); meta == nil || meta.Get(keyFormat) == nil {
		return errors.New("is not an orchestrator's record")
	}
	return nil
}

// prepare creates the buckets of a new file, and checks the format of an existing one.
func prepare(tx *bbolt.Tx) error {
	meta, err := tx.CreateBucketIfNotExists(bucketMeta)
	if err != nil {
		return err
	}
	for _, k := range kinds {
		if _, err := tx.CreateBucketIfNotExists([]byte(k)); err != nil {
			return err
		}
	}
	switch raw := meta.Get(keyFormat); {
	case raw == nil:
		return meta.Put(keyFormat, binary.BigEndian.AppendUint32(nil, format))
	case len(raw) != 4:
		return fmt.Errorf("the format number is damaged: %w", errdefs.ErrDataLoss)
	case binary.BigEndian.Uint32(raw) > format:
		return fmt.Errorf("a later tripod wrote format %d, this one supports %d: start the later one: %w",
			binary.BigEndian.Uint32(raw), format, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// all passes every record to the given function.
func (s *store) all(each func(*Record) error) error {
	return s.db.View(func(tx *bbolt.Tx) error {
		for _, k := range kinds {
			err := tx.Bucket([]byte(k)).ForEach(func(_, v []byte) error {
				r, err := decodeRecord(v)
				if err != nil {
					return err
				}
				return each(r)
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// write puts and removes records in one transaction. When write returns nil, the changes are on the disk.
func (s *store) write(changes map[key]*Record) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		for k, r := range changes {
			b := tx.Bucket([]byte(k.kind))
			if r == nil {
				if err := b.Delete([]byte(k.uuid)); err != nil {
					return err
				}
				continue
			}
			value, err := r.encode()
			if err != nil {
				return err
			}
			if err := b.Put([]byte(k.uuid), value); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *store) close() error { return s.db.Close() }
