package code

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// entry describes one file of code.
type entry struct {
	// Digest is the digest of the component. Engine is the fingerprint of the engine.
	Digest string `json:"digest"`
	Engine string `json:"engine"`
	// Size (in bytes) and SHA256 (in hexadecimal) describe the code.
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// Key is the fingerprint of the key that has signed the code; empty if this node has compiled it.
	Key string `json:"key,omitempty"`
}

// keep stores code. If this fails, the code is used once, and the next start makes it again.
func (c *Cache) keep(ctx context.Context, e entry, code *os.File) error {
	if err := fpCompiled.Hit(ctx); err != nil {
		return err
	}
	if err := c.store(e, code); err != nil {
		c.log.Warn("store compiled code failed; the next start makes it again", "component", e.Digest, "err", err)
		c.drop(e)
	}
	return fpStored.Hit(ctx)
}

// EntryDir returns the directory of a component's code. The directory is named after the first half of the digest; the
// entry contains the whole digest.
func (c *Cache) EntryDir(digest string) string { return filepath.Join(c.cfg.Dir, shortName(digest)) }

// file returns the path of an entry's file.
func (c *Cache) file(e entry, kind string) string {
	sum := sha256.Sum256([]byte(e.Engine + e.Key))
	return filepath.Join(c.EntryDir(e.Digest), hex.EncodeToString(sum[:8])+kind)
}

// candidates returns what identifies the entries whose code can be used: that which was compiled here, and those with
// accepted signatures.
func candidates(engine string, component Source) []entry {
	list := []entry{{Digest: component.Wasm.Digest.String(), Engine: engine}}
	for _, key := range component.trust.signers() {
		list = append(list, entry{Digest: list[0].Digest, Engine: engine, Key: key})
	}
	return list
}

// read returns the entry with the digest, engine and key of the given one. It returns errdefs.ErrNotFound if there is none.
func (c *Cache) read(wanted entry) (e entry, err error) {
	if err := format.Read(c.file(wanted, ".json"), &e); err != nil {
		return entry{}, err
	}
	if e.Digest != wanted.Digest || e.Engine != wanted.Engine || e.Key != wanted.Key {
		return entry{}, fmt.Errorf("the entry is for %s with engine %s, signed by %q: %w", e.Digest, e.Engine, e.Key, errdefs.ErrDataLoss)
	}
	return e, nil
}

// store writes the code and then its entry, whose size and checksum it sets. It syncs neither, because the checksum detects
// Code damaged by a power loss.
func (c *Cache) store(e entry, code *os.File) error {
	if err := os.MkdirAll(c.EntryDir(e.Digest), 0o700); err != nil {
		return err
	}
	c.storing.Lock()
	defer c.storing.Unlock()
	path := c.file(e, ".code")
	tmp := path + ".new"
	out, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	sum := sha256.New()
	e.Size, err = io.Copy(io.MultiWriter(out, sum), io.NewSectionReader(code, 0, 1<<62))
	if err = errors.Join(err, out.Close()); err != nil {
		return errors.Join(err, ledger.RemoveFile(tmp))
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	e.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return format.Write(c.file(e, ".json"), e)
}

// drop deletes the files of the code and of its entry, even incomplete files.
func (c *Cache) drop(e entry) {
	c.storing.Lock()
	defer c.storing.Unlock()
	for _, kind := range []string{".json", ".json.new", ".code", ".code.new"} {
		_ = ledger.RemoveFile(c.file(e, kind))
	}
}

// stored returns the entry of the code for the component and the engine, or false if there is no code that can be used. It
// does not read the code, unlike verified.
func (c *Cache) stored(engine string, component Source) (entry, bool) {
	for _, wanted := range candidates(engine, component) {
		e, err := c.read(wanted)
		if err != nil {
			continue
		}
		if info, err := os.Lstat(c.file(e, ".code")); err == nil && info.Mode().IsRegular() && info.Size() == e.Size {
			return e, true
		}
	}
	return entry{}, false
}

// Has reports whether there is optimised code of a component.
func (c *Cache) Has(component Source) bool {
	engine, err := c.compiler.engine()
	if err != nil {
		return false
	}
	_, ok := c.stored(engine, component)
	return ok
}

// verified opens code after checking it against its entry. It returns errdefs.ErrNotFound if there is no code, or only such
// as was signed by keys that the node does not accept for the image. It returns ErrDataLoss if all code is damaged.
func (c *Cache) verified(engine string, component Source) (*os.File, error) {
	var errs []error
	for _, wanted := range candidates(engine, component) {
		code, err := c.openEntry(wanted)
		if err == nil {
			return code, nil
		}
		if !errdefs.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("code of %s: %w", component.Wasm.Digest, errdefs.ErrNotFound)
	}
	return nil, errors.Join(errs...)
}

// openEntry opens the code of an entry; see verified.
func (c *Cache) openEntry(wanted entry) (*os.File, error) {
	e, err := c.read(wanted)
	if err != nil {
		return nil, err
	}
	code, err := os.OpenFile(c.file(e, ".code"), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	sum := sha256.New()
	n, err := io.Copy(sum, code)
	if err == nil && (n != e.Size || hex.EncodeToString(sum.Sum(nil)) != e.SHA256) {
		err = fmt.Errorf("%s (%d bytes) does not match the size (%d) and checksum of its entry: %w", code.Name(), n, e.Size, errdefs.ErrDataLoss)
	}
	if err == nil {
		_, err = code.Seek(0, io.SeekStart)
	}
	if err != nil {
		code.Close()
		return nil, err
	}
	return code, nil
}

// Forget deletes a component's code from the disk after a worker has refused the code. Code of an image is not taken again.
func (c *Cache) Forget(component Source) {
	engine, err := c.compiler.engine()
	if err != nil {
		return
	}
	if e, ok := c.stored(engine, component); ok && e.Key != "" {
		c.layers.reject(component.id())
	}
	for _, e := range candidates(engine, component) {
		c.drop(e)
	}
}

// Evict deletes all code from the disk, except the code of components that are in the given set or are being compiled.
func (c *Cache) Evict(wanted map[string]bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries, err := os.ReadDir(c.cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	keep := map[string]bool{}
	for digest := range wanted {
		keep[shortName(digest)] = true
	}
	for id := range c.flights {
		keep[shortName(id.digest)] = true
	}
	c.layers.evict(keep)
	maps.DeleteFunc(c.failed, func(digest string, _ failure) bool { return !keep[shortName(digest)] })
	for _, e := range entries {
		if !keep[e.Name()] {
			errs = append(errs, os.RemoveAll(filepath.Join(c.cfg.Dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}
