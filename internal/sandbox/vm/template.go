package vm

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/continuity/fs"

	"github.com/tripod-run/tripod/internal/failpoint"
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

// wish is a template that is wanted for the like of a machine, which boots with these CPUs and this memory. The container is nil if the machine is not
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

func newTemplates(machines *Backend, kind templateKind, c Config, log *slog.Logger) *templates {
	return &templates{
		machines: machines, kind: kind, dir: templatesDir(c.Root), log: log, most: c.VM.Templates, scope: c.VM.TemplateScope, end: func() {},
		wanted: make(chan wish, templateQueue), free: func() (uint64, uint64, error) { return freeRoom(c.Root) },
		ready: make(chan struct{}), have: map[string]*Template{}, queued: map[string]bool{}, problems: map[string]string{}, troubles: map[string]trouble{},
	}
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

// templateState says whether the machines like a pod's have a template.
type templateState struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	// Problem says why the node does not make the template. It is empty while the template is being made.
	Problem string `json:"problem,omitempty"`
}

// look returns the state of the template for the like of a running machine, or nil if the machine cannot have one.
func (t *templates) look(ctx context.Context, p *sandbox.Pod, d machine.Definition) (*templateState, error) {
	if !t.fits(d) {
		return nil, nil
	}
	name, err := t.name(ctx, t.namespace(p), d)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &templateState{Name: name, Ready: t.have[name] != nil}
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
