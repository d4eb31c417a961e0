package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/synced"
)

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// temporaryPrefix marks files that are not completely written yet. No key begins with a dot.
	temporaryPrefix = ".tmp-"
)

// errCorrupt marks a record with invalid content.
var errCorrupt = errors.New("corrupt record")

// record keeps the configuration and arguments of an ADD for the later DEL. It is written before ADD and removed after
// DEL.
type record struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	// Created distinguishes successive attachments with the same ID.
	Created time.Time `json:"created"`
	// Source tells a person who reads the file where Conf comes from.
	Source string `json:"source"`
	// Conf is a configuration list with all its plugins.
	Conf         json.RawMessage            `json:"conf"`
	Interface    string                     `json:"interface"`
	Args         [][2]string                `json:"args"`
	Capabilities map[string]json.RawMessage `json:"capabilities"`

	key  string                    // keyOf(ID)
	list *libcni.NetworkConfigList // Conf, parsed
}

func newRecord(a Attachment, c *chain) (*record, error) {
	caps, err := a.capabilities()
	if err != nil {
		return nil, err
	}
	list, err := c.forPod(caps)
	if err != nil {
		return nil, err
	}
	return &record{
		Version: recordVersion, ID: a.ID, Created: time.Now(), Source: c.source, Conf: list.Bytes,
		Interface: interfaceName, Args: a.args(), Capabilities: caps, key: keyOf(a.ID), list: list,
	}, nil
}

// runtimeConf returns the arguments for libcni. The path of the namespace is "" if the namespace is gone.
func (r *record) runtimeConf(netns string) *libcni.RuntimeConf {
	caps := make(map[string]any, len(r.Capabilities))
	for name, value := range r.Capabilities {
		caps[name] = value
	}
	return &libcni.RuntimeConf{ContainerID: r.key, NetNS: netns, IfName: r.Interface, Args: r.Args, CapabilityArgs: caps}
}

// sameRequest reports whether two records have the same ID, interface and arguments. Their configurations may differ.
func (r *record) sameRequest(other *record) bool {
	mine, err1 := json.Marshal([]any{r.ID, r.Interface, r.Args, r.Capabilities})
	theirs, err2 := json.Marshal([]any{other.ID, other.Interface, other.Args, other.Capabilities})
	return err1 == nil && err2 == nil && string(mine) == string(theirs)
}

// recordStore keeps records as files in a directory, one per key.
type recordStore struct{ dir string }

func (s recordStore) path(key string) string { return filepath.Join(s.dir, key+recordSuffix) }

// open makes the directory and removes half-written files. A read-only file system is not an error.
func (s recordStore) open() error {
	if err := s.makeDir(); err != nil && !errors.Is(err, unix.EROFS) {
		return err
	}
	leftovers, err := filepath.Glob(filepath.Join(s.dir, temporaryPrefix+"*"))
	for _, file := range leftovers {
		if removeErr := os.Remove(file); !errors.Is(removeErr, unix.EROFS) { // it can stay, because nothing reads it
			err = errors.Join(err, removeErr)
		}
	}
	return err
}

func (s recordStore) makeDir() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("make directory of network records: %w", err)
	}
	return nil
}

// put writes the record so that it survives a power loss.
func (s recordStore) put(r *record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	err = writeDurably(s.path(r.key), data)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("write record (make room on the file system of %s): %w: %w", s.dir, err, errdefs.ErrResourceExhausted)
	}
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

// get reads a record. It returns nil if there is no record, and errCorrupt if the record's content is invalid.
func (s recordStore) get(key string) (*record, error) {
	data, err := os.ReadFile(s.path(key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read record: %w", err)
	}
	r := record{key: key}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", s.path(key), errCorrupt, err)
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("%s: record version %d is unknown, want %d (was tripod downgraded?)", s.path(key), r.Version, recordVersion)
	}
	r.list, err = libcni.NetworkConfFromBytes(r.Conf)
	if err == nil && keyOf(r.ID) != key {
		err = errors.New("the ID does not match the file's name")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w of %q: %w", s.path(key), errCorrupt, r.ID, err)
	}
	return &r, nil
}

func (s recordStore) remove(key string) error {
	if err := os.Remove(s.path(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record: %w", err)
	}
	return nil
}

// keys returns the keys of all records.
func (s recordStore) keys() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // open could not make the directory
	}
	if err != nil {
		return nil, fmt.Errorf("list network records: %w", err)
	}
	var keys []string
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), recordSuffix); ok && !strings.HasPrefix(key, temporaryPrefix) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// writeDurably replaces the content of the file at path. When it returns, the new content is on disk. If the process is
// killed, the file has its old or its new content. A power loss before the return can leave an empty file, which
// readers must detect. The file is synced only after the rename, which saves a file system commit. That is safe because
// nothing depends on the file before the return.
func writeDurably(path string, data []byte) (err error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	file, err := os.CreateTemp(dir.Name(), temporaryPrefix+"*")
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.Write(data)
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	synced.Add(2)
	return errors.Join(file.Sync(), dir.Sync())
}
