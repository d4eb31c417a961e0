package templates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// This file keeps the templates on the disk: it reads those of earlier daemons, and removes those that are of no more use.

// nameForm matches a template's directory.
var nameForm = lazyregexp.New(`^[0-9a-f]{32}$`)

// load reads the templates that earlier daemons have made, and removes those that are incomplete or no longer of use.
func (t *Set) load(ctx context.Context) {
	defer t.loaded.Do(func() { close(t.ready) })
	entries, err := os.ReadDir(t.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.log.Warn("templates of machines are not used", "err", err)
	}
	for _, e := range entries {
		one, useless, err := t.check(ctx, e.Name())
		switch {
		case useless != "":
			t.log.Info("removing a template of machines", "template", e.Name(), "reason", useless)
			if err := removeDir(filepath.Join(t.dir, e.Name())); err != nil {
				t.log.Warn("cannot remove a template of machines", "template", e.Name(), "err", err)
			}
		case err != nil:
			t.log.Warn("a template of machines is not used", "template", e.Name(), "err", err)
		default:
			t.mu.Lock()
			t.have[one.Name] = &one
			t.mu.Unlock()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.evict()
}

// check reads a template. It says why the template is useless, if it is.
func (t *Set) check(ctx context.Context, name string) (one Template, useless string, err error) {
	if !nameForm().MatchString(name) {
		return one, "it is not complete", nil
	}
	one, err = read(filepath.Join(t.dir, name))
	var syntax *json.SyntaxError
	if errors.Is(err, os.ErrNotExist) || errors.As(err, &syntax) {
		return one, "it is not complete", nil
	}
	if err != nil {
		return one, "", err
	}
	now, err := t.name(ctx, one.Namespace, one.Definition)
	if err != nil {
		return one, "", err
	}
	if now != name || one.Scope != t.scope {
		return one, "the guest, QEMU, the processor or the configuration has changed", nil
	}
	return one, "", nil
}

// readAll reads a file to find out whether that is possible.
func readAll(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(io.Discard, f)
	return err
}

// Continued records that a machine has continued from a template.
func (t *Set) Continued(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.troubles, name)
	if one := t.have[name]; one != nil {
		one.failures = 0
	}
}

// Failed records that a machine has not continued from a template, and when its start began. A template that no machine can
// Use is removed. Otherwise the machine may only have been slow, or without memory.
func (t *Set) Failed(name string, began time.Time, refused bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.have[name]
	if one == nil || one.CreatedAt.After(began) {
		return // it was an earlier template with this name
	}
	if began.After(one.failedAt) { // machines that start at the same time fail for the same reason
		one.failures, one.failedAt = one.failures+1, time.Now()
	}
	if refused || one.failures >= tries {
		t.discard(one)
	}
}

// paused reports whether a template is not to be made for now. The caller holds mu.
func (t *Set) paused(name string) bool {
	before := t.troubles[name]
	return before.times > 0 && time.Since(before.at) < retryPause<<min(before.times-1, doublings)
}

// trouble makes a pause before a template is made again. The caller holds mu.
func (t *Set) trouble(name string) {
	t.troubles[name] = trouble{t.troubles[name].times + 1, time.Now()}
}

// dropUseless removes the templates that no machine will use: those of an earlier guest or QEMU, or that somebody has removed.
func (t *Set) dropUseless(ctx context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, one := range t.have {
		if _, useless, _ := t.check(ctx, name); useless != "" {
			t.log.Info("removing a template of machines", "template", name, "reason", useless)
			t.remove(one)
		}
	}
}

// discard removes a template from which machines do not continue. The caller holds mu.
func (t *Set) discard(one *Template) {
	if t.have[one.Name] == one { // not one that was made meanwhile
		t.trouble(one.Name)
		t.remove(one)
	}
}

// remove removes a template. The caller holds mu.
func (t *Set) remove(one *Template) {
	delete(t.have, one.Name)
	if err := removeDir(filepath.Join(t.dir, one.Name)); err != nil {
		t.log.Warn("cannot remove a template of machines", "template", one.Name, "err", err)
	}
}

// oldest returns the template that was used least recently. The caller holds mu.
func (t *Set) oldest() *Template {
	var oldest *Template
	for _, one := range t.have {
		if oldest == nil || one.UsedAt.Before(oldest.UsedAt) {
			oldest = one
		}
	}
	return oldest
}

// evict removes those that were used least recently, if there are too many. A machine that is about to continue from one
// boots instead. The caller holds mu.
func (t *Set) evict() {
	for len(t.have) > t.most {
		t.remove(t.oldest())
	}
}

// removeDir removes a template's directory, its description first, so that a rest is not taken for a template.
func removeDir(dir string) error {
	if err := os.Remove(filepath.Join(dir, recordFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

func dirOf(root string) string { return filepath.Join(root, "templates") }

// read reads the description of the template in a directory.
func read(dir string) (t Template, err error) {
	file := filepath.Join(dir, recordFile)
	raw, err := os.ReadFile(file)
	if err != nil {
		return t, err
	}
	info, err := os.Stat(file)
	if err != nil {
		return t, err
	}
	err = json.Unmarshal(raw, &t)
	t.UsedAt = info.ModTime()
	return t, err
}

// List lists the complete templates of the handler with the given root directory, the one that was used last first. The daemon
// need not run.
func List(root string) ([]Template, error) {
	entries, err := os.ReadDir(dirOf(root))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var list []Template
	for _, e := range entries {
		if !nameForm().MatchString(e.Name()) {
			continue
		}
		one, err := read(filepath.Join(dirOf(root), e.Name()))
		if err != nil {
			continue // it is being removed, or damaged; the daemon says so
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b Template) int { return b.UsedAt.Compare(a.UsedAt) })
	return list, nil
}

// Remove removes a template of the handler with the given root directory. Machines that continue from it at the same time
// boot. The daemon need not run. It returns errdefs.ErrNotFound if there is no such template.
func Remove(root, name string) error {
	dir := filepath.Join(dirOf(root), name)
	if !nameForm().MatchString(name) {
		return fmt.Errorf("template %q: %w", name, errdefs.ErrNotFound)
	}
	if _, err := os.Stat(filepath.Join(dir, recordFile)); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("template %s: %w", name, errdefs.ErrNotFound)
	}
	return removeDir(dir)
}
