package templates

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// keyed is a driver whose machines differ in their memory only.
type keyed struct {
	machine.Driver
	qemu string
}

func (k keyed) SaveKey(_ context.Context, d machine.Definition) (string, error) {
	raw, err := json.Marshal([]any{k.qemu, d.Memory})
	return string(raw), err
}

// drivers are machines of which only the driver is used.
type drivers struct {
	Machines
	driver keyed
}

func (d drivers) Driver() machine.Driver { return d.driver }

// templateRig is a node with templates.
type templateRig struct {
	t    *testing.T
	root string
	cfg  config.VM
	qemu string
}

func newTemplateRig(t *testing.T) *templateRig {
	return &templateRig{t: t, qemu: "7.2", root: t.TempDir(), cfg: config.VM{Templates: 2, TemplateScope: "namespace"}}
}

// open opens the templates, as the next daemon does.
func (r *templateRig) open() *Set {
	r.t.Helper()
	machines := drivers{driver: keyed{qemu: r.qemu}}
	all := New(machines, Kind{Size: func(uint64) uint64 { return 100 << 20 }}, r.root, r.cfg, slog.New(slog.NewTextHandler(r.t.Output(), nil)))
	all.load(r.t.Context())
	return all
}

// add writes a template that was used at the given minute, and returns its name.
func (r *templateRig) add(namespace string, memory uint64, minute int) string {
	r.t.Helper()
	made := Template{Namespace: namespace, Scope: r.cfg.TemplateScope, Definition: machine.Definition{Memory: memory}, Size: 7}
	name, err := r.open().name(r.t.Context(), namespace, made.Definition)
	if err != nil {
		r.t.Fatal(err)
	}
	made.Name = name
	raw, err := json.Marshal(made)
	if err != nil {
		r.t.Fatal(err)
	}
	r.write(filepath.Join(name, "scratch0.qcow2"), "the template's disk")
	file := r.write(filepath.Join(name, recordFile), string(raw))
	used := time.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC)
	if err := os.Chtimes(file, used, used); err != nil {
		r.t.Fatal(err)
	}
	return name
}

func (r *templateRig) write(name, content string) string {
	r.t.Helper()
	path := filepath.Join(dirOf(r.root), name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		r.t.Fatal(err)
	}
	return path
}

// dirs returns the names of all directories of templates.
func (r *templateRig) dirs() (names []string) {
	r.t.Helper()
	entries, err := os.ReadDir(dirOf(r.root))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Use asks for a template for a machine with a NIC, and returns the machine's definition.
func (r *templateRig) use(t *Set, namespace string, memory uint64, nics int) machine.Definition {
	r.t.Helper()
	disk := filepath.Join(r.t.TempDir(), "scratch0.qcow2")
	if err := os.WriteFile(disk, []byte("an empty disk"), 0o600); err != nil {
		r.t.Fatal(err)
	}
	d := machine.Definition{
		Memory: memory, Plug: true,
		Disks: []machine.Disk{{ID: "guest0", ReadOnly: true, File: machine.File{Path: "/guest"}},
			{ID: "scratch0", File: machine.File{Path: disk}}},
		NICs: make([]machine.NIC, nics), Shares: []machine.Share{{Tag: "share0", Driver: machine.ShareVirtiofs}},
	}
	p := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Namespace: namespace}}}
	if err := t.Use(r.t.Context(), p, &d); err != nil {
		r.t.Fatal(err)
	}
	raw, err := os.ReadFile(disk)
	if copied := string(raw) == "the template's disk"; err != nil || copied != (d.Saved != "") {
		r.t.Errorf("disk of a machine with the template %q: got %q (error %v)", d.Saved, raw, err)
	}
	return d
}

// TestTemplatesLoad: a daemon keeps the templates of earlier daemons that it can still use, as many as it may have, and removes
// what else it finds.
func TestTemplatesLoad(t *testing.T) {
	r := newTemplateRig(t)
	r.cfg.Templates = 10
	one, two, three := r.add("a", 1, 3), r.add("a", 2, 1), r.add("b", 1, 2)
	r.write("new-"+one+"/memory", "incomplete")
	r.write("00000000000000000000000000000000/memory", "without a description")
	r.write("11111111111111111111111111111111/"+recordFile, "{")
	r.open()
	if got, want := r.dirs(), []string{one, two, three}; !equalSets(got, want) {
		t.Errorf("templates: got %v, want %v", got, want)
	}
	r.cfg.Templates = 2
	r.open()
	if got, want := r.dirs(), []string{one, three}; !equalSets(got, want) {
		t.Errorf("the two templates that were used last: got %v, want %v", got, want)
	}
	r.qemu = "8.0"
	r.open()
	if got := r.dirs(); len(got) != 0 {
		t.Errorf("templates of another QEMU: got %v, want none", got)
	}
	none := r.add("", 1, 1)
	r.open()
	if got := r.dirs(); !slices.Equal(got, []string{none}) {
		t.Errorf("templates of pods without a namespace: got %v, want %s", got, none)
	}
	for _, scope := range []string{"node", "namespace"} {
		r.cfg.TemplateScope = scope
		r.open()
		if got := r.dirs(); len(got) != 0 {
			t.Errorf("templates of another scope than %s: got %v, want none", scope, got)
		}
		r.add("", 1, 1)
	}
}

// TestTemplatesUse: a machine continues from the template for its namespace and size only. A template that somebody has removed
// is none.
func TestTemplatesUse(t *testing.T) {
	r := newTemplateRig(t)
	name := r.add("a", 1, 1)
	all := r.open()
	before := time.Now()
	if d := r.use(all, "a", 1, machine.SavedDevices-1); d.Saved != filepath.Join(dirOf(r.root), name) {
		t.Errorf("template of the machine: got %q, want %s", d.Saved, name)
	}
	if list, err := List(r.root); err != nil || len(list) != 1 || list[0].Name != name || list[0].UsedAt.Before(before.Add(-time.Second)) {
		t.Errorf("templates after the use: got %+v (error %v)", list, err)
	}
	for what, d := range map[string]machine.Definition{
		"another namespace": r.use(all, "b", 1, 1), "another size": r.use(all, "a", 2, 1),
		"too many NICs": r.use(all, "a", 1, machine.SavedDevices),
	} {
		if d.Saved != "" {
			t.Errorf("%s: got the template %s, want none", what, d.Saved)
		}
	}
	for _, wrong := range []string{"", "..", "../" + name, "00000000000000000000000000000000"} {
		if err := Remove(r.root, wrong); !errdefs.IsNotFound(err) {
			t.Errorf("remove %q: got %v, want NotFound", wrong, err)
		}
	}
	if err := Remove(r.root, name); err != nil {
		t.Fatal(err)
	}
	if d := r.use(all, "a", 1, 1); d.Saved != "" || len(all.have) != 0 {
		t.Errorf("a template that was removed: got %q, and %v in memory", d.Saved, all.have)
	}
	shared := newTemplateRig(t)
	shared.cfg.TemplateScope = "node"
	shared.add("", 1, 1)
	if d := shared.use(shared.open(), "any", 1, 1); d.Saved == "" {
		t.Error("a node that shares its templates used none")
	}
}

// TestTemplatesDamaged: a template without its disk is removed, and the machine keeps the disk with which it boots.
func TestTemplatesDamaged(t *testing.T) {
	r := newTemplateRig(t)
	r.cfg.TemplateScope = "node"
	name := r.add("", 1, 1)
	all := r.open()
	gone := filepath.Join(t.TempDir(), "gone", "scratch0.qcow2") // as if the disk were full
	d := machine.Definition{Memory: 1, Plug: true, Disks: []machine.Disk{{ID: "scratch0", File: machine.File{Path: gone}}},
		Shares: []machine.Share{{Driver: machine.ShareVirtiofs}}}
	if err := all.Use(t.Context(), &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{}}, &d); err == nil || d.Saved != "" ||
		len(all.have) != 1 || len(r.dirs()) != 1 {
		t.Errorf("a copy that fails on the pod's side: got error %v, template %q, templates %v, want that the template is kept", err, d.Saved,
			r.dirs())
	}
	damaged := filepath.Join(dirOf(r.root), name, "scratch0.qcow2")
	if err := errors.Join(os.Remove(damaged), os.Mkdir(damaged, 0o700)); err != nil { // it can be opened, but not read
		t.Fatal(err)
	}
	disk := filepath.Join(t.TempDir(), "scratch0.qcow2")
	if err := os.WriteFile(disk, []byte("an empty disk"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Disks[0].Path = disk
	err := all.Use(t.Context(), &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{}}, &d)
	if left, _ := os.ReadDir(filepath.Dir(disk)); err == nil || d.Saved != "" || len(all.have) != 0 || len(r.dirs()) != 0 || len(left) != 1 {
		t.Errorf("a damaged template: got error %v, template %q, templates %v, files of the machine %v", err, d.Saved, r.dirs(), left)
	}
	if raw, err := os.ReadFile(disk); err != nil || string(raw) != "an empty disk" {
		t.Errorf("disk of the machine: got %q (error %v)", raw, err)
	}
}

// TestTemplatesRoom: a template that was used lately does not give way to another one.
func TestTemplatesRoom(t *testing.T) {
	r := newTemplateRig(t)
	r.add("a", 1, 1)
	old := r.add("a", 2, 2)
	all := r.open()
	if !all.room() {
		t.Error("no room beside templates that were not used for long")
	}
	r.use(all, "a", 1, 1)
	if oldest := all.oldest(); oldest.Name != old || !all.room() {
		t.Errorf("no room, or not in the place of %s but of %s", old, oldest.Name)
	}
	r.use(all, "a", 2, 1)
	if all.room() {
		t.Error("room beside templates that were all used lately")
	}
}

// TestTemplatesFail: a template that is refused is removed at once. One from which machines do not continue, perhaps because the
// node is busy, is removed after some failures at different times, if none continues in between. Then it is not made for a
// while, which grows until a machine continues.
func TestTemplatesFail(t *testing.T) {
	r := newTemplateRig(t)
	name := r.add("a", 1, 1)
	all := r.open()
	began := time.Now()
	for range 2 * tries {
		all.Failed(name, began, false)
	}
	if len(all.have) != 1 {
		t.Error("machines that were slow at the same time have removed a template")
	}
	for range tries - 2 {
		all.Failed(name, time.Now(), false)
	}
	all.Continued(name)
	for range tries - 1 {
		all.Failed(name, time.Now(), false)
	}
	if len(all.have) != 1 || len(r.dirs()) != 1 {
		t.Error("machines that were slow have removed a template from which one has continued meanwhile")
	}
	all.Failed(name, time.Now(), false)
	if len(all.have) != 0 || len(r.dirs()) != 0 {
		t.Errorf("after %d failures: got templates %v, want none", tries, r.dirs())
	}
	pauses := func(after time.Duration) bool {
		all.troubles[name] = trouble{all.troubles[name].times, time.Now().Add(-after)}
		return all.paused(name)
	}
	if !pauses(retryPause-time.Minute) || pauses(retryPause+time.Minute) {
		t.Errorf("the first pause is not %s", retryPause)
	}
	r.add("a", 1, 1)
	all.load(t.Context())
	all.Failed(name, time.Now(), true)
	if len(all.have) != 0 || len(r.dirs()) != 0 || !pauses(2*retryPause-time.Minute) || pauses(2*retryPause+time.Minute) {
		t.Errorf("a refused template: got templates %v, want none for %s", r.dirs(), 2*retryPause)
	}
	if all.Continued(name); pauses(0) {
		t.Error("a pause after a machine has continued")
	}
	before := time.Now()
	r.add("a", 1, 1)
	all.load(t.Context())
	all.have[name].CreatedAt = time.Now()
	all.Failed(name, before, true)
	if len(all.have) != 1 {
		t.Error("the failure of a machine that began before the template was made has removed it")
	}
	all.discard(&Template{Name: name})
	if len(all.have) != 1 {
		t.Error("the removal of an earlier template has removed the one that has its name now")
	}
}

// TestTemplatesAsk: pods of one kind wait for their template as one, and do not keep those of another kind out of the queue.
func TestTemplatesAsk(t *testing.T) {
	r := newTemplateRig(t)
	have := r.add("a", 1, 1)
	all := r.open()
	all.trouble("broken")
	for range 2 * queueSize {
		for _, name := range []string{"one", have, "broken"} {
			all.ask(Wish{Name: name})
		}
	}
	all.ask(Wish{Name: "two"})
	if len(all.wanted) != 2 || (<-all.wanted).Name != "one" || (<-all.wanted).Name != "two" {
		t.Error("the queue does not consist of one wish for each of the two templates")
	}
}

// TestTemplatesMakeRoom: templates that somebody has removed, or that a new QEMU cannot use, do not keep another one from being
// made. A node that lacks memory or disk makes none.
func TestTemplatesMakeRoom(t *testing.T) {
	r := newTemplateRig(t)
	removed := r.add("a", 1, 1)
	kept := r.add("a", 2, 1)
	all := r.open()
	all.have[removed].UsedAt, all.have[kept].UsedAt = time.Now(), time.Now()
	if err := Remove(r.root, removed); err != nil {
		t.Fatal(err)
	}
	if all.room() {
		t.Fatal("room beside templates that were used lately")
	}
	const least = 2*100<<20 + margin
	for _, free := range [][2]uint64{{least - 1, 1 << 60}, {1 << 60, least - 1}} {
		all.free = func() (uint64, uint64, error) { return free[0], free[1], nil }
		if err := all.makeFor(t.Context(), Wish{Name: "x", Pod: &sandbox.Pod{}, Memory: 1 << 36}); !errdefs.IsResourceExhausted(err) {
			t.Errorf("a template with memory and disk %v: got %v, want ResourceExhausted", free, err)
		}
	}
	if all.have[removed] != nil || all.have[kept] == nil || !all.room() || all.paused("x") {
		t.Errorf("templates: got %v, want %s only", all.have, kept)
	}
	all.machines = drivers{driver: keyed{qemu: "8.0"}}
	if all.dropUseless(t.Context()); len(all.have) != 0 || len(r.dirs()) != 0 {
		t.Errorf("templates of an earlier QEMU: got %v", r.dirs())
	}
	if memory, disk, err := freeRoom(r.root); err != nil || memory < 1<<20 || disk == 0 {
		t.Errorf("free on this node: got memory %d, disk %d (error %v)", memory, disk, err)
	}
}

// TestCheckTemplates: tripod check says how many templates there are, how old and how large.
func TestCheckTemplates(t *testing.T) {
	r := newTemplateRig(t)
	if got := Check("vm-oci", r.root); len(got) != 0 {
		t.Errorf("findings without templates: got %v", got)
	}
	r.add("a", 1, 1)
	r.add("a", 2, 3)
	want := "2 ready, 0 MiB on disk, the oldest from 0001-01-01T00:00:00Z; last used 2026-01-01T00:03:00Z"
	if got := Check("vm-oci", r.root); len(got) != 1 || !got[0].OK || got[0].Detail != want {
		t.Errorf("findings: got %+v, want %q", got, want)
	}
}

func equalSets(a, b []string) bool {
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

// TestTemplatesAwaitLoad: a pod that comes while the daemon still reads its templates waits for them, but not forever.
func TestTemplatesAwaitLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTemplateRig(t)
		r.add("a", 1, 0)
		next := New(r.open().machines, Kind{}, r.root, r.cfg, slog.New(slog.DiscardHandler))
		if d := r.use(next, "a", 1, 1); d.Saved != "" {
			t.Errorf("a template of a daemon that does not read them: got %q", d.Saved)
		}
		go func() {
			time.Sleep(time.Second) // pacing: the pod waits meanwhile
			next.load(t.Context())
		}()
		if d := r.use(next, "a", 1, 1); d.Saved == "" {
			t.Error("a pod that waited has no template")
		}
	})
}
