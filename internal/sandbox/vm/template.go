package vm

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpTemplateBooted = failpoint.New("vm-template.booted")
	fpTemplateSaved  = failpoint.New("vm-template.saved")
	fpTemplateMade   = failpoint.New("vm-template.made")
)

const (
	// templatePause is the pause after a template could not be made or used. It doubles each time, templateDoublings times at
	// most. A template that was used in this time does not give way to another one.
	templatePause     = 10 * time.Minute
	templateDoublings = 6
	// templateTries is after how many failures, with no success in between, a template is removed.
	templateTries = 3
	// templateMargin is what is left on the disk and in memory after a template was made, in bytes.
	templateMargin = 512 << 20
	// removePause is the pause after the machine of a template could not be removed.
	removePause = time.Minute
	// reportTime is how long the kernel of a guest needs to report all free pages, so that QEMU gives them back. It looks for
	// some every 2 s.
	reportTime = 5 * time.Second
	// cloneTime bounds the start of a machine from a template. Then the pod gets a machine that boots.
	cloneTime = 30 * time.Second
	// loadTime bounds the wait for the templates of earlier daemons, which are quicker to read than a machine boots.
	loadTime = 5 * time.Second
	// templateQueue is how many templates can wait to be made.
	templateQueue = 16
)

// Template describes a template: a machine that was booted and stopped, and from which machines of pods continue.
type Template struct {
	// Name identifies the template on this node.
	Name string `json:"name"`
	// Namespace is the Kubernetes namespace of the pods that use it; "" means all.
	Namespace string `json:"namespace"`
	// Scope is Config.VM.TemplateScope when it was made.
	Scope string `json:"scope"`
	// Definition is that of the machine. Only machines with the same machine.Driver.SaveKey can continue from it.
	Definition machine.Definition `json:"definition"`
	CreatedAt  time.Time          `json:"createdAt"`
	// Size is the room in bytes that it takes on the disk.
	Size int64 `json:"size"`
	// UsedAt is when a machine was last made from it.
	UsedAt time.Time `json:"-"`

	failures int       // since a machine last continued from it
	failedAt time.Time // the last of them
}

// trouble counts how often a template could not be made, or had to be removed, and when that last was.
type trouble struct {
	times int
	at    time.Time
}

// wish is a template that is wanted for the like of a machine, which has these CPUs and this memory. The container is nil if the machine is not
// a container.
type wish struct {
	name      string
	pod       *sandbox.Pod
	container *sandbox.Container
	cpus      int
	memory    uint64
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
	machines *Backend
	kind     templateKind
	dir      string
	log      *slog.Logger
	most     int // how many are kept; 0 means that there are none
	// scope is "namespace", or "node" if the pods of all namespaces use the same templates.
	scope  string
	wanted chan wish
	// ready is closed when load has read the templates of earlier daemons.
	ready  chan struct{}
	loaded sync.Once
	// end ends run. making counts it, and the removals of the templates' machines.
	end    context.CancelFunc
	making sync.WaitGroup
	// free returns how much memory and disk the node has for templates, in bytes. Tests replace it.
	free func() (memory, disk uint64, err error)

	mu       sync.Mutex
	have     map[string]*Template
	queued   map[string]bool    // those in wanted
	problems map[string]string  // why those that are missing were not made
	troubles map[string]trouble // of those from which no machine has continued since
}

// templateKind is what differs between the templates of the handlers.
type templateKind struct {
	handler string
	// unit returns the pod and the container of a machine like that of a wish, without anything that is the pod's own.
	unit func(w wish) (*sandbox.Pod, *sandbox.Container)
	// settle waits until the guest of a template's machine, whose agent has answered, can be saved.
	settle func(ctx context.Context, id string) error
	// size estimates the room in bytes that a template takes of the disk and of memory, for a machine with this memory.
	size func(memory uint64) uint64
	// time bounds the making of a template.
	time time.Duration
}

const templateFile = "template.json"

// templateName matches a template's directory.
var templateName = lazyregexp.New(`^[0-9a-f]{32}$`)

func newTemplates(machines *Backend, kind templateKind, c Config, log *slog.Logger) *templates {
	return &templates{
		machines: machines, kind: kind, dir: templatesDir(c.Root), log: log, most: c.VM.Templates, scope: c.VM.TemplateScope, end: func() {},
		wanted: make(chan wish, templateQueue), free: func() (uint64, uint64, error) { return freeRoom(c.Root) },
		ready: make(chan struct{}), have: map[string]*Template{}, queued: map[string]bool{}, problems: map[string]string{}, troubles: map[string]trouble{},
	}
}

// load reads the templates that earlier daemons have made, and removes those that are incomplete or no longer of use.
func (t *templates) load(ctx context.Context) {
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
	if now != name || one.Scope != t.scope {
		return one, "the guest, QEMU, the processor or the configuration has changed", nil
	}
	return one, "", nil
}

// name returns the name of the template for a machine.
func (t *templates) name(ctx context.Context, namespace string, d machine.Definition) (string, error) {
	key, err := t.machines.cfg.Driver.SaveKey(ctx, d)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(namespace + "\x00" + key))
	return hex.EncodeToString(sum[:16]), nil
}

// namespace returns the namespace of the templates that a pod may use.
func (t *templates) namespace(p *sandbox.Pod) string {
	if t.scope == "node" {
		return ""
	}
	return p.Config.GetMetadata().GetNamespace()
}

// fits reports whether a machine can continue from a template.
func (t *templates) fits(d machine.Definition) bool {
	return t.most > 0 && d.Plug && machine.CheckSaved(d) == nil
}

// use makes a machine that is about to be defined and started continue from a template, if there is one.
func (t *templates) use(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
	found := *d
	if err := t.find(ctx, p, &found); err != nil || found.Saved == "" {
		return err
	}
	if err := t.copyDisks(found); err != nil {
		return err
	}
	d.Saved = found.Saved
	return nil
}

// TemplateState says whether the machines like a pod's have a template.
type TemplateState struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	// Problem says why the node does not make the template. It is empty while the template is being made.
	Problem string `json:"problem,omitempty"`
}

// look returns the state of the template for the like of a running machine, or nil if the machine cannot have one.
func (t *templates) look(ctx context.Context, p *sandbox.Pod, d machine.Definition) (*TemplateState, error) {
	if !t.fits(d) {
		return nil, nil
	}
	name, err := t.name(ctx, t.namespace(p), d)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &TemplateState{Name: name, Ready: t.have[name] != nil}
	if !s.Ready && !t.queued[name] {
		s.Problem = cmp.Or(t.problems[name], "nothing has asked for it yet")
	}
	return s, nil
}

// inspect adds the template of a pod's machine to the facts about the pod.
func (t *templates) inspect(ctx context.Context, p *sandbox.Pod, facts map[string]any) error {
	h, err := t.machines.ledger.Find(p.ID, p.ID)
	if h == nil {
		return err
	}
	s, _ := h.Snapshot()
	found, err := t.look(ctx, p, s.Definition)
	if found != nil {
		facts["template"] = found
	}
	return err
}

// find sets Definition.Saved if there is a template for the machine. The machine's disks must be those of copyDisks when it
// starts.
func (t *templates) find(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
	if !t.fits(*d) {
		return nil
	}
	select { // the daemon may have just started
	case <-t.ready:
	case <-time.After(loadTime):
	case <-ctx.Done():
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
	if found != nil {
		d.Saved = dir
	}
	return nil
}

// copyDisks replaces the disks of a machine that is about to continue from a template by copies of the template's.
func (t *templates) copyDisks(d machine.Definition) error {
	for _, disk := range d.Disks {
		if disk.ReadOnly {
			continue
		}
		from := filepath.Join(d.Saved, filepath.Base(disk.Path))
		if err := replaceDisk(disk.Path, from); err != nil {
			if damaged := readAll(from); damaged != nil {
				t.mu.Lock()
				defer t.mu.Unlock()
				if one := t.have[filepath.Base(d.Saved)]; one != nil {
					t.discard(one)
				}
			}
			return fmt.Errorf("copy the template's disk: %w", err)
		}
	}
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

// continued records that a machine has continued from a template.
func (t *templates) continued(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.troubles, name)
	if one := t.have[name]; one != nil {
		one.failures = 0
	}
}

// failed records that a machine has not continued from a template, and when its start began. A template that no machine can
// use is removed. Otherwise the machine may only have been slow, or without memory.
func (t *templates) failed(name string, began time.Time, refused bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.have[name]
	if one == nil || one.CreatedAt.After(began) {
		return // it was an earlier template with this name
	}
	if began.After(one.failedAt) { // machines that start at the same time fail for the same reason
		one.failures, one.failedAt = one.failures+1, time.Now()
	}
	if refused || one.failures >= templateTries {
		t.discard(one)
	}
}

// want asks for a template for machines like the pod's, which has booted. The container is the machine, if it is one.
func (t *templates) want(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) {
	h, _ := t.machines.ledger.Find(p.ID, p.ID)
	if h == nil {
		return
	}
	s, _ := h.Snapshot()
	if !t.fits(s.Definition) {
		return
	}
	name, err := t.name(ctx, t.namespace(p), s.Definition)
	if err != nil {
		t.log.Warn("no template of machines is made", "pod", p.ID, "err", err)
		return
	}
	t.ask(wish{name, p, c, s.Definition.CPUs, s.Definition.Memory})
}

// ask puts a wish into the queue, unless the template is there, in the queue or was lately in trouble.
func (t *templates) ask(w wish) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.have[w.name] != nil || t.queued[w.name] || t.paused(w.name) {
		return
	}
	select {
	case t.wanted <- w:
		t.queued[w.name] = true
	default: // a later pod asks again
	}
}

// paused reports whether a template is not to be made for now. The caller holds mu.
func (t *templates) paused(name string) bool {
	before := t.troubles[name]
	return before.times > 0 && time.Since(before.at) < templatePause<<min(before.times-1, templateDoublings)
}

// trouble makes a pause before a template is made again. The caller holds mu.
func (t *templates) trouble(name string) {
	t.troubles[name] = trouble{t.troubles[name].times + 1, time.Now()}
}

// start begins to run.
func (t *templates) start(ctx context.Context) {
	ctx, t.end = context.WithCancel(ctx)
	t.making.Go(func() { t.run(ctx) })
}

// close ends run. The machine that it is making a template of, if there is one, is removed.
func (t *templates) close() {
	t.end()
	t.making.Wait()
}

// run loads the templates, and makes those that are wanted, until ctx ends.
func (t *templates) run(ctx context.Context) {
	t.load(ctx)
	for {
		select {
		case w := <-t.wanted:
			err := guard.Call(t.log, "make a template of machines", func() error { return t.makeFor(ctx, w) })
			if err != nil && ctx.Err() == nil {
				t.log.Warn("cannot make a template of machines", "pod", w.pod.ID, "err", err)
			}
			t.mu.Lock()
			delete(t.queued, w.name)
			delete(t.problems, w.name)
			if err != nil {
				t.problems[w.name] = err.Error()
			}
			t.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

// makeFor makes a template, unless there is one. The pod may already be removed.
func (t *templates) makeFor(ctx context.Context, w wish) error {
	t.dropUseless(ctx)
	t.mu.Lock()
	done, room := t.have[w.name] != nil || t.paused(w.name), t.room()
	t.mu.Unlock()
	if done {
		return nil
	}
	if !room {
		return fmt.Errorf("the node has %d templates (vm.templates), all used in the last %s: %w", t.most, templatePause, errdefs.ErrResourceExhausted)
	}
	if err := t.affords(w.memory); err != nil {
		return err
	}
	name := w.name
	mp, mc := t.machine(w)
	defer t.making.Go(func() { t.removeMachine(ctx, mp) })
	making, cancel := context.WithTimeout(ctx, t.kind.time)
	defer cancel()
	began := time.Now()
	if err := t.make(making, mp, mc, name); err != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.trouble(name)
		return errors.Join(err, os.RemoveAll(t.newDir(name)))
	}
	t.log.Info("made a template of machines", "template", name, "namespace", t.namespace(w.pod), "duration", time.Since(began))
	return nil
}

// dropUseless removes the templates that no machine will use: those of an earlier guest or QEMU, or that somebody has removed.
func (t *templates) dropUseless(ctx context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, one := range t.have {
		if _, useless, _ := t.check(ctx, name); useless != "" {
			t.log.Info("removing a template of machines", "template", name, "reason", useless)
			t.remove(one)
		}
	}
}

// affords returns errdefs.ErrResourceExhausted if the node has no room for a template of a machine with this memory.
func (t *templates) affords(memory uint64) error {
	freeMemory, freeDisk, err := t.free()
	if err != nil {
		return err
	}
	if need := 2*t.kind.size(memory) + templateMargin; freeMemory < need || freeDisk < need {
		return fmt.Errorf("a template needs %s of memory and disk; the node has %s and %s: %w", quantity(need), quantity(freeMemory), quantity(freeDisk), errdefs.ErrResourceExhausted)
	}
	return nil
}

// freeRoom returns how much memory the node has available, and how much disk is free in a directory, in bytes.
func freeRoom(dir string) (memory, disk uint64, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	_, rest, _ := strings.Cut(string(raw), "\nMemAvailable:")
	if _, err := fmt.Sscan(rest, &memory); err != nil {
		return 0, 0, fmt.Errorf("/proc/meminfo has no MemAvailable: %w", err)
	}
	return memory << 10, fs.Bavail * uint64(fs.Bsize), nil
}

func (t *templates) newDir(name string) string { return filepath.Join(t.dir, "new-"+name) }

// make boots a machine without a network, and saves it. The machine of an interrupted daemon is one that is not in the record;
// Recover removes it.
func (t *templates) make(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container, name string) error {
	machines := t.machines
	if err := machines.CreateSandbox(ctx, mp); err != nil {
		return err
	}
	if _, err := machines.CreateContainer(ctx, mp, mc); err != nil {
		return err
	}
	if err := machines.StartContainer(ctx, mp, mc); err != nil {
		return fmt.Errorf("%w%s", err, t.machines.lastWords(mp.ID))
	}
	if err := fpTemplateBooted.Hit(ctx); err != nil {
		return err
	}
	if err := t.kind.settle(ctx, mp.ID); err != nil {
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

// removeMachine removes the machine of a template. A machine that remains when ctx ends is removed by the next daemon.
func (t *templates) removeMachine(ctx context.Context, mp *sandbox.Pod) {
	for {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		err := t.machines.RemoveSandbox(undo, mp)
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

// machine returns the unit pod of the machine of a template, and its container.
func (t *templates) machine(w wish) (*sandbox.Pod, *sandbox.Container) {
	mp, mc := t.kind.unit(w)
	mp.ID, mp.Netns, mp.IPs = rand.Text(), "", nil
	id := sha256.Sum256([]byte(mp.ID))
	mp.ID = hex.EncodeToString(id[:])
	mc.ID = mp.ID
	mp.Config.Metadata = &runtimeapi.PodSandboxMetadata{Name: "template-" + w.name, Namespace: t.namespace(w.pod), Uid: mp.ID}
	mp.Config.Hostname, mp.Config.DnsConfig, mp.Config.Linux.CgroupParent = "", nil, ""
	return mp, mc
}

// save saves the machine of a template. From then on, machines use it.
func (t *templates) save(ctx context.Context, mp *sandbox.Pod, name string, d machine.Definition) error {
	dir := t.newDir(name)
	if err := errors.Join(removeTemplate(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return sandbox.DiskError(err)
	}
	if err := t.machines.cfg.Driver.Save(ctx, mp.ID, dir); err != nil {
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
	now := time.Now()
	made := &Template{
		Name: name, Namespace: mp.Config.GetMetadata().GetNamespace(), Scope: t.scope, Definition: d, CreatedAt: now, Size: usage.Size, UsedAt: now,
	}
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

// discard removes a template from which machines do not continue. The caller holds mu.
func (t *templates) discard(one *Template) {
	if t.have[one.Name] == one { // not one that was made meanwhile
		t.trouble(one.Name)
		t.remove(one)
	}
}

// remove removes a template. The caller holds mu.
func (t *templates) remove(one *Template) {
	delete(t.have, one.Name)
	if err := removeTemplate(filepath.Join(t.dir, one.Name)); err != nil {
		t.log.Warn("cannot remove a template of machines", "template", one.Name, "err", err)
	}
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
		t.remove(t.oldest())
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
