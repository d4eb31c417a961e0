package vm

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpTemplateBooted = failpoint.New("vm-oci.template.booted")
	fpTemplateSaved  = failpoint.New("vm-oci.template.saved")
	fpTemplateMade   = failpoint.New("vm-oci.template.made")
)

const (
	// templateTime bounds the making of a template.
	templateTime = 5 * time.Minute
	// templatePause is the pause after a template could not be made, for example because the disk is full. A template that was
	// used in this time does not give way to another one.
	templatePause = 10 * time.Minute
	// removePause is the pause after the machine of a template could not be removed.
	removePause = time.Minute
	// reportTime is how long the kernel of a guest needs to report all free pages, so that QEMU gives them back. It looks for
	// some every 2 s.
	reportTime = 5 * time.Second
	// cloneTime bounds the start of a machine from a template. Then the pod gets a machine that boots.
	cloneTime = 30 * time.Second
	// templateQueue is how many templates can wait to be made.
	templateQueue = 16
)

// Template describes a template: a machine that was booted and stopped, and from which machines of pods continue.
type Template struct {
	// Name identifies the template on this node.
	Name string `json:"name"`
	// Namespace is the Kubernetes namespace of the pods that use it; "" means all.
	Namespace string `json:"namespace"`
	// Definition is that of the machine. Only machines with the same machine.Driver.SaveKey can continue from it.
	Definition machine.Definition `json:"definition"`
	CreatedAt  time.Time          `json:"createdAt"`
	// Size is the room in bytes that it takes on the disk.
	Size int64 `json:"size"`
	// UsedAt is when a machine was last made from it.
	UsedAt time.Time `json:"-"`
}

// templates keeps the templates, in one directory each:
//
//	<name>/template.json      Template
//	<name>/scratch0.qcow2     the scratch disk
//	<name>/memory, state, key written by machine.Driver.Save
//	new-<name>/               one that is being made
//
// The time of template.json's last change is Template.UsedAt. A pod whose machine had to boot makes the node want a template
// for its like. One task makes them, one after the other.
type templates struct {
	o    *OCI
	dir  string
	log  *slog.Logger
	most int // how many are kept; 0 means that there are none
	// perNode lets the pods of all namespaces use the same templates.
	perNode bool
	wanted  chan *sandbox.Pod

	mu     sync.Mutex
	have   map[string]*Template
	failed map[string]time.Time // when it could last not be made
}

const templateFile = "template.json"

// templateName matches a template's directory.
var templateName = lazyregexp.New(`^[0-9a-f]{32}$`)

func (o *OCI) newTemplates(c Config) *templates {
	return &templates{
		o: o, dir: templatesDir(c.Root), log: o.log, most: c.VM.Templates, perNode: c.VM.TemplateScope == "node",
		wanted: make(chan *sandbox.Pod, templateQueue), have: map[string]*Template{}, failed: map[string]time.Time{},
	}
}

// load reads the templates that earlier daemons have made, and removes those that are incomplete or no longer of use.
func (t *templates) load(ctx context.Context) {
	entries, err := os.ReadDir(t.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.log.Warn("templates of machines are not used", "err", err)
	}
	for _, e := range entries {
		one, useless, err := t.check(ctx, e.Name())
		switch {
		case useless != "":
			t.log.Info("removing a template of machines", "template", e.Name(), "reason", useless)
			if err := removeTemplate(filepath.Join(t.dir, e.Name())); err != nil {
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
func (t *templates) check(ctx context.Context, name string) (one Template, useless string, err error) {
	if !templateName().MatchString(name) {
		return one, "it is not complete", nil
	}
	one, err = readTemplate(filepath.Join(t.dir, name))
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
	if now != name || (one.Namespace == "") != t.perNode {
		return one, "the guest, QEMU, the processor or the configuration has changed", nil
	}
	return one, "", nil
}

// name returns the name of the template for a machine.
func (t *templates) name(ctx context.Context, namespace string, d machine.Definition) (string, error) {
	key, err := t.o.machines.cfg.Driver.SaveKey(ctx, d)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(namespace + "\x00" + key))
	return hex.EncodeToString(sum[:16]), nil
}

// namespace returns the namespace of the templates that a pod may use.
func (t *templates) namespace(p *sandbox.Pod) string {
	if t.perNode {
		return ""
	}
	return p.Config.GetMetadata().GetNamespace()
}

// fits reports whether a machine can continue from a template.
func (t *templates) fits(d machine.Definition) bool {
	return t.most > 0 && d.Plug && len(d.Shares) == 1 && len(d.NICs) <= machine.SavedNICs
}

// use makes a machine that is about to be defined continue from a template, if there is one.
func (t *templates) use(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
	if !t.fits(*d) {
		return nil
	}
	name, err := t.name(ctx, t.namespace(p), *d)
	if err != nil {
		return err
	}
	t.mu.Lock()
	found := t.have[name]
	dir, now := filepath.Join(t.dir, name), time.Now()
	if found != nil {
		found.UsedAt = now
		if err := os.Chtimes(filepath.Join(dir, templateFile), now, now); errors.Is(err, os.ErrNotExist) {
			delete(t.have, name) // somebody has removed it
			found = nil
		}
	}
	t.mu.Unlock()
	if found == nil {
		return nil
	}
	for _, disk := range d.Disks {
		if disk.ReadOnly {
			continue
		}
		if err := replaceDisk(disk.Path, filepath.Join(dir, filepath.Base(disk.Path))); err != nil {
			return errors.Join(fmt.Errorf("copy the template's disk: %w", err), t.discard(name))
		}
	}
	d.Saved = dir
	return nil
}

// replaceDisk replaces a disk by a copy of another one. The disk stays as it is, so that a machine can boot with it, until the
// copy is complete.
func replaceDisk(path, from string) error {
	temporary := path + ".new"
	err := fs.CopyFile(temporary, from)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		_ = os.Remove(temporary)
	}
	return err
}

// want asks for a template for machines like the pod's.
func (t *templates) want(p *sandbox.Pod) {
	if t.most == 0 {
		return
	}
	select {
	case t.wanted <- p:
	default: // a later pod asks again
	}
}

// run loads the templates, and makes those that are wanted, until ctx ends.
func (t *templates) run(ctx context.Context) {
	t.load(ctx)
	for {
		select {
		case p := <-t.wanted:
			err := guard.Call(t.log, "make a template of machines", func() error { return t.makeFor(ctx, p) })
			if err != nil && ctx.Err() == nil {
				t.log.Warn("cannot make a template of machines", "pod", p.ID, "err", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// makeFor makes a template for machines like the pod's, unless there is one.
func (t *templates) makeFor(ctx context.Context, p *sandbox.Pod) error {
	h, err := t.o.machines.ledger.Find(p.ID, p.ID)
	if h == nil {
		return err // the pod is already removed
	}
	s, _ := h.Snapshot()
	if s.Definition.Saved != "" || !t.fits(s.Definition) {
		return nil
	}
	name, err := t.name(ctx, t.namespace(p), s.Definition)
	if err != nil {
		return err
	}
	t.mu.Lock()
	done := t.have[name] != nil || time.Since(t.failed[name]) < templatePause || !t.room()
	t.mu.Unlock()
	if done {
		return nil
	}
	mp, mc := t.machine(p, name)
	defer t.o.making.Go(func() { t.remove(ctx, mp) })
	making, cancel := context.WithTimeout(ctx, templateTime)
	defer cancel()
	began := time.Now()
	if err := t.make(making, mp, mc, name); err != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.failed[name] = time.Now()
		return errors.Join(err, os.RemoveAll(t.newDir(name)))
	}
	t.log.Info("made a template of machines", "template", name, "namespace", t.namespace(p), "duration", time.Since(began))
	return nil
}

func (t *templates) newDir(name string) string { return filepath.Join(t.dir, "new-"+name) }

// make boots a machine without a network, and saves it. The machine of an interrupted daemon is one that is not in the record;
// Recover removes it.
func (t *templates) make(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container, name string) error {
	machines := t.o.machines
	if err := machines.CreateSandbox(ctx, mp); err != nil {
		return err
	}
	if _, err := machines.CreateContainer(ctx, mp, mc); err != nil {
		return err
	}
	if err := machines.StartContainer(ctx, mp, mc); err != nil {
		return fmt.Errorf("%w%s", err, t.o.lastWords(mp.ID))
	}
	if err := fpTemplateBooted.Hit(ctx); err != nil {
		return err
	}
	if err := t.o.call(ctx, mp.ID, guestapi.Request{Method: guestapi.MethodFreeze}, nil, nil); err != nil {
		return err
	}
	select {
	case <-time.After(reportTime):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	h, err := machines.ledger.Find(mp.ID, mp.ID)
	if h == nil {
		return fmt.Errorf("the machine is gone: %w", err)
	}
	s, _ := h.Snapshot()
	if now, err := t.name(ctx, mp.Config.GetMetadata().GetNamespace(), s.Definition); err != nil {
		return err
	} else if now != name {
		return fmt.Errorf("the machine differs from the pod's, or its files have changed meanwhile: %w", errdefs.ErrAborted)
	}
	return t.save(ctx, mp, name, s.Definition)
}

// remove removes the machine of a template. A machine that remains when ctx ends is removed by the next daemon.
func (t *templates) remove(ctx context.Context, mp *sandbox.Pod) {
	for {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		err := t.o.machines.RemoveSandbox(undo, mp)
		cancel()
		if err == nil {
			return
		}
		t.log.Error("cannot remove the machine of a template", "pod", mp.ID, "err", err)
		select {
		case <-time.After(removePause):
		case <-ctx.Done():
			return
		}
	}
}

// machine returns the unit pod of the machine of a template for pods like p, and its container.
func (t *templates) machine(p *sandbox.Pod, name string) (*sandbox.Pod, *sandbox.Container) {
	mp, mc := t.o.machine(p)
	mp.ID, mp.Netns, mp.IPs = rand.Text(), "", nil
	id := sha256.Sum256([]byte(mp.ID))
	mp.ID = hex.EncodeToString(id[:])
	mc.ID = mp.ID
	mp.Config.Metadata = &runtimeapi.PodSandboxMetadata{Name: "template-" + name, Namespace: t.namespace(p), Uid: mp.ID}
	mp.Config.Hostname, mp.Config.DnsConfig, mp.Config.Linux.CgroupParent = "", nil, ""
	mc.Config.Mounts = nil
	return mp, mc
}

// save saves the machine of a template. From then on, machines use it.
func (t *templates) save(ctx context.Context, mp *sandbox.Pod, name string, d machine.Definition) error {
	dir := t.newDir(name)
	if err := errors.Join(removeTemplate(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return sandbox.DiskError(err)
	}
	if err := t.o.machines.cfg.Driver.Save(ctx, mp.ID, dir); err != nil {
		return sandbox.DiskError(err)
	}
	for _, disk := range d.Disks {
		if !disk.ReadOnly {
			if err := copySynced(filepath.Join(dir, filepath.Base(disk.Path)), disk.Path); err != nil {
				return sandbox.DiskError(fmt.Errorf("copy the disk: %w", err))
			}
		}
	}
	if err := fpTemplateSaved.Hit(ctx); err != nil {
		return err
	}
	usage, err := fs.DiskUsage(ctx, dir)
	if err != nil {
		return err
	}
	made := &Template{Name: name, Namespace: mp.Config.GetMetadata().GetNamespace(), Definition: d, CreatedAt: time.Now(), Size: usage.Size}
	made.UsedAt = made.CreatedAt
	raw, err := json.Marshal(made)
	if err != nil {
		return err
	}
	if err := atomicfile.Write(filepath.Join(dir, templateFile), raw, 0o600); err != nil {
		return sandbox.DiskError(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	to := filepath.Join(t.dir, name)
	if err := errors.Join(removeTemplate(to), os.Rename(dir, to)); err != nil {
		return sandbox.DiskError(err)
	}
	t.have[name] = made
	t.evict()
	return fpTemplateMade.Hit(ctx)
}

// copySynced copies a file and returns once the copy is on disk.
func copySynced(to, from string) error {
	if err := fs.CopyFile(to, from); err != nil {
		return err
	}
	f, err := os.Open(to)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// discard removes a template from which a machine could not continue.
func (t *templates) discard(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.have, name)
	return removeTemplate(filepath.Join(t.dir, name))
}

// oldest returns the template that was used least recently. The caller holds mu.
func (t *templates) oldest() *Template {
	var oldest *Template
	for _, one := range t.have {
		if oldest == nil || one.UsedAt.Before(oldest.UsedAt) {
			oldest = one
		}
	}
	return oldest
}

// room reports whether there is room for a template, perhaps in the place of one that was not used lately. Otherwise nodes
// with many kinds of machines would make templates all the time. The caller holds mu.
func (t *templates) room() bool {
	return len(t.have) < t.most || time.Since(t.oldest().UsedAt) > templatePause
}

// evict removes those that were used least recently, if there are too many. A machine that is about to continue from one
// boots instead. The caller holds mu.
func (t *templates) evict() {
	for len(t.have) > t.most {
		oldest := t.oldest()
		delete(t.have, oldest.Name)
		if err := removeTemplate(filepath.Join(t.dir, oldest.Name)); err != nil {
			t.log.Warn("cannot remove a template of machines", "template", oldest.Name, "err", err)
		}
	}
}

// removeTemplate removes a template's directory, its description first, so that a rest is not taken for a template.
func removeTemplate(dir string) error {
	if err := os.Remove(filepath.Join(dir, templateFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

func templatesDir(root string) string { return filepath.Join(root, "templates") }

// readTemplate reads the description of the template in a directory.
func readTemplate(dir string) (t Template, err error) {
	file := filepath.Join(dir, templateFile)
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

// Templates lists the complete templates below Config.Root of the handler vm-oci, the one that was used last first. The daemon
// need not run.
func Templates(root string) ([]Template, error) {
	entries, err := os.ReadDir(templatesDir(root))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var list []Template
	for _, e := range entries {
		if !templateName().MatchString(e.Name()) {
			continue
		}
		one, err := readTemplate(filepath.Join(templatesDir(root), e.Name()))
		if err != nil {
			continue // it is being removed, or damaged; the daemon says so
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b Template) int { return b.UsedAt.Compare(a.UsedAt) })
	return list, nil
}

// RemoveTemplate removes a template below Config.Root of the handler vm-oci. Machines that continue from it at the same time
// boot. The daemon need not run. It returns errdefs.ErrNotFound if there is no such template.
func RemoveTemplate(root, name string) error {
	dir := filepath.Join(templatesDir(root), name)
	if !templateName().MatchString(name) {
		return fmt.Errorf("template %q: %w", name, errdefs.ErrNotFound)
	}
	if _, err := os.Stat(filepath.Join(dir, templateFile)); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("template %s: %w", name, errdefs.ErrNotFound)
	}
	return removeTemplate(dir)
}
