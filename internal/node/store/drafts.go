package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/bbolt"

	"github.com/tripod-run/tripod/internal/atomicfile"
)

// drafts is a directory of values that need not outlive the machine. Each file has a head and a value:
//
//	tripod-draft 1 <boot ID> <ID of the record file> <hash of the value that it replaces, or ->
//	<value>
//
// A draft counts only during its boot, with its record file, and while that file still has the value that the draft
// replaces. So a draft that a killed process left behind a later Put is void, and so is every draft beside a record file
// from a backup.
type drafts struct{ dir, boot string }

const draftFormat = "tripod-draft 1"

// KeepDrafts makes Draft keep its values in dir, which should be on a tmpfs, and removes the drafts there that no longer
// count. Call it once, before the first Draft. A store without such a directory syncs drafts like other values.
func (s *Store) KeepDrafts(dir string) error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("drafts of the record: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("drafts of the record: %w", err)
	}
	s.drafts = drafts{dir: dir, boot: strings.TrimSpace(string(boot))}
	return s.removeVoid()
}

// removeVoid removes what a killed process left behind: drafts that no longer count, and those that were never completed.
func (s *Store) removeVoid() error {
	incomplete, err := filepath.Glob(filepath.Join(s.drafts.dir, "*.new"))
	if err != nil {
		return fmt.Errorf("drafts of the record: %w", err)
	}
	for _, path := range incomplete {
		_ = os.Remove(path)
	}
	all, err := s.drafts.list(s.id)
	if err != nil {
		return err
	}
	for _, d := range all {
		if base, err := s.hash(d.kind, d.key); err == nil && base != d.base {
			s.drafts.remove(d.kind, d.key)
		}
	}
	return nil
}

// Draft is like Put, but does not sync: the value survives the end of the process, not that of the machine. Use it for
// what is about to happen, because after a reboot nothing is about to happen any more. The next Put or Delete of the key
// replaces the draft.
//
// Like Put, Draft fails if the record file cannot be written, so that nothing begins whose end could not be recorded.
func (s *Store) Draft(kind, key string, value []byte) error {
	if s.drafts.dir == "" {
		return s.Put(kind, key, value)
	}
	if err := s.Err(); err != nil {
		return wrapWrite(err)
	}
	base, err := s.hash(kind, key)
	if err != nil {
		return wrapWrite(err)
	}
	head := fmt.Sprintf("%s %s %s %s\n", draftFormat, s.drafts.boot, s.id, base)
	if err := atomicfile.Replace(s.drafts.path(kind, key), append([]byte(head), value...), 0o600); err != nil {
		return s.Put(kind, key, value) // the directory is full or gone
	}
	return nil
}

// hash returns the hash of a value in the record file.
func (s *Store) hash(kind, key string) (hash string, err error) {
	hash = hashOf(nil)
	err = s.view(func(tx *bbolt.Tx) error {
		if b := tx.Bucket([]byte(kind)); b != nil {
			hash = hashOf(b.Get([]byte(key)))
		}
		return nil
	})
	return hash, err
}

func hashOf(value []byte) string {
	if value == nil {
		return "-"
	}
	sum := sha256.Sum256(value)
	return hex.EncodeToString(sum[:])
}

func (d drafts) path(kind, key string) string {
	return filepath.Join(d.dir, kind+"-"+url.PathEscape(key))
}

// remove removes a draft that Put or Delete has replaced. If that fails, the draft is void all the same.
func (d drafts) remove(kind, key string) {
	if d.dir != "" {
		_ = os.Remove(d.path(kind, key))
	}
}

// draft is a value in a drafts directory, and the hash of the value that it replaces.
type draft struct {
	kind, key, base string
	value           []byte
}

// list returns the drafts of this boot that belong to the given record file, and removes all others.
func (d drafts) list(record string) ([]draft, error) {
	if d.dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return nil, fmt.Errorf("drafts of the record: %w", err)
	}
	var all []draft
	for _, e := range entries {
		kind, escaped, ok := strings.Cut(e.Name(), "-")
		key, err := url.PathUnescape(escaped)
		if !ok || err != nil || filepath.Ext(e.Name()) == ".new" { // .new: a draft that was never completed
			continue
		}
		raw, err := os.ReadFile(filepath.Join(d.dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("drafts of the record: %w", err)
		}
		head, value, _ := bytes.Cut(raw, []byte("\n"))
		base, ours := strings.CutPrefix(string(head), fmt.Sprintf("%s %s %s ", draftFormat, d.boot, record))
		if !ours {
			d.remove(kind, key)
			continue
		}
		all = append(all, draft{kind, key, base, value})
	}
	return all, nil
}

// settleDrafts puts the drafts that count into the record file, so that a version without drafts finds the same values.
// A draft that cannot be put stays for the next Open.
func (s *Store) settleDrafts() {
	all, _ := s.drafts.list(s.id)
	for _, d := range all {
		if base, err := s.hash(d.kind, d.key); err == nil && base == d.base {
			_ = s.Put(d.kind, d.key, d.value)
		}
	}
}
