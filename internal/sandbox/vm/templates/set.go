package templates

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

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

var (
	fpBooted = failpoint.New("vm-template.booted")
	fpSaved  = failpoint.New("vm-template.saved")
	fpMade   = failpoint.New("vm-template.made")
)

const (
	// retryPause is the pause after a template could not be made or used. It doubles each time, templateDoublings times at
	// most. A template that was used in this time does not give way to another one.
	retryPause = 10 * time.Minute
	doublings  = 6
	// tries is after how many failures, with no success in between, a template is removed.
	tries = 3
	// margin is what is left on the disk and in memory after a template was made, in bytes.
	margin = 512 << 20
	// removePause is the pause after the machine of a template could not be removed.
	removePause = time.Minute
	// removeTime bounds one attempt to remove the machine of a template.
	removeTime = 30 * time.Second
	// reportTime is how long the kernel of a guest needs to report all free pages, so that QEMU gives them back. It looks for
	// some every 2 s.
	reportTime = 5 * time.Second
	// StartTime bounds the start of a machine from a template. Then the pod gets a machine that boots.
	StartTime = 30 * time.Second
	// loadTime bounds the wait for the templates of earlier daemons, which are quicker to read than a machine boots.
	loadTime = 5 * time.Second
	// queueSize is how many templates can wait to be made.
	queueSize = 16
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

// Wish is a template that is wanted for the like of a machine, which boots with these CPUs and this memory. The container is nil
// if the machine is not a container.
type Wish struct {
	Name      string
	Pod       *sandbox.Pod
	Container *sandbox.Container
	CPUs      int
	Memory    uint64
}

// Set keeps the templates, in one directory each:
//
//	<name>/template.json      Template
//	<name>/scratch0.qcow2     the scratch disk
//	<name>/memory, state, key written by machine.Driver.Save
//	new-<name>/               one that is being made
//
// The time of template.json's last change is Template.UsedAt. A pod whose machine had to boot makes the node want a template
// for its like. One task makes them, one after the other.
type Set struct {
	machines Machines
	kind     Kind
	dir      string
	log      *slog.Logger
	most     int // how many are kept; 0 means that there are none
	// scope is "namespace", or "node" if the pods of all namespaces use the same templates.
	scope  string
	wanted chan Wish
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

// Machines is the part of a backend for machines that templates use; *vm.Backend implements it.
type Machines interface {
	CreateSandbox(ctx context.Context, p *sandbox.Pod) error
	CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error)
	StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error
	RemoveSandbox(ctx context.Context, p *sandbox.Pod) error
	// Driver returns the driver that runs the machines.
	Driver() machine.Driver
	// Definition returns the definition of a pod's machine, or nil if the pod has none.
	Definition(id string) (*machine.Definition, error)
	// LastWords returns the end of what the guest has written to its console, for an error message.
	LastWords(id string) string
}

// Kind is what differs between the templates of the handlers.
type Kind struct {
	Handler string
	// Unit returns the pod and the container of a machine like that of a wish, without anything that is the pod's own.
	Unit func(w Wish) (*sandbox.Pod, *sandbox.Container)
	// Settle waits until the guest of a template's machine, whose agent has answered, can be saved.
	Settle func(ctx context.Context, id string) error
	// Size estimates the room in bytes that a template takes of the disk and of memory, for a machine with this memory.
	Size func(memory uint64) uint64
	// Time bounds the making of a template.
	Time time.Duration
}

const recordFile = "template.json"

// New returns the templates of a handler, whose machines have the given root directory. They are used and made once Start is
// called.
func New(machines Machines, kind Kind, root string, c config.VM, log *slog.Logger) *Set {
	return &Set{
		machines: machines, kind: kind, dir: dirOf(root), log: log, most: c.Templates, scope: c.TemplateScope, end: func() {},
		wanted: make(chan Wish, queueSize), free: func() (uint64, uint64, error) { return freeRoom(root) },
		ready: make(chan struct{}), have: map[string]*Template{}, queued: map[string]bool{}, problems: map[string]string{},
		troubles: map[string]trouble{},
	}
}

// name returns the name of the template for a machine.
func (t *Set) name(ctx context.Context, namespace string, d machine.Definition) (string, error) {
	key, err := t.machines.Driver().SaveKey(ctx, d)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(namespace + "\x00" + key))
	return hex.EncodeToString(sum[:16]), nil
}

// namespace returns the namespace of the templates that a pod may use.
func (t *Set) namespace(p *sandbox.Pod) string {
	if t.scope == "node" {
		return ""
	}
	return p.Config.GetMetadata().GetNamespace()
}

// fits reports whether a machine can continue from a template.
func (t *Set) fits(d machine.Definition) bool {
	return t.most > 0 && d.Plug && machine.CheckSaved(d) == nil
}

// Use makes a machine that is about to be defined and started continue from a template, if there is one.
func (t *Set) Use(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
	found := *d
	if err := t.Find(ctx, p, &found); err != nil || found.Saved == "" {
		return err
	}
	if err := t.CopyDisks(found); err != nil {
		return err
	}
	d.Saved = found.Saved
	return nil
}

// state says whether the machines like a pod's have a template.
type state struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	// Problem says why the node does not make the template. It is empty while the template is being made.
	Problem string `json:"problem,omitempty"`
}

// look returns the state of the template for the like of a running machine, or nil if the machine cannot have one.
func (t *Set) look(ctx context.Context, p *sandbox.Pod, d machine.Definition) (*state, error) {
	if !t.fits(d) {
		return nil, nil
	}
	name, err := t.name(ctx, t.namespace(p), d)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &state{Name: name, Ready: t.have[name] != nil}
	if !s.Ready && !t.queued[name] {
		s.Problem = cmp.Or(t.problems[name], "nothing has asked for it yet")
	}
	return s, nil
}

// Inspect adds the template of a pod's machine to the facts about the pod.
func (t *Set) Inspect(ctx context.Context, p *sandbox.Pod, facts map[string]any) error {
	d, err := t.machines.Definition(p.ID)
	if d == nil {
		return err
	}
	found, err := t.look(ctx, p, *d)
	if found != nil {
		facts["template"] = found
	}
	return err
}

// Find sets Definition.Saved if there is a template for the machine. The machine's disks must be those of copyDisks when it
// starts.
func (t *Set) Find(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
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
		if err := os.Chtimes(filepath.Join(dir, recordFile), now, now); errors.Is(err, os.ErrNotExist) {
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

// CopyDisks replaces the disks of a machine that is about to continue from a template by copies of the template's.
func (t *Set) CopyDisks(d machine.Definition) error {
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

// Of returns the name of the template from which a machine continues, or "".
func Of(d machine.Definition) string {
	if d.Saved == "" {
		return ""
	}
	return filepath.Base(d.Saved)
}
