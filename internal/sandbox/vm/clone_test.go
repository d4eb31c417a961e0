package vm

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
)

// keyedHypervisor is a hypervisor on which all machines have the same key, and none continues from a saved state.
type keyedHypervisor struct{ *hypervisor }

func (keyedHypervisor) SaveKey(context.Context, machine.Definition) (string, error) {
	return "key", nil
}

func (d keyedHypervisor) Start(ctx context.Context, name string) error {
	if d.guest(name).definition.Saved != "" {
		return machine.ErrSaved
	}
	return d.hypervisor.Start(ctx, name)
}

// TestBootInstead: a machine that does not continue from its template boots, with new disks: not with those of the template.
func TestBootInstead(t *testing.T) {
	r := newRig(t, func(s *settings) {
		s.Driver, s.AgentDisk = keyedHypervisor{s.Driver.(*hypervisor)}, "/agent"
	})
	r.Backend.templates = templates.New(r.Backend, r.templateKind(), r.config.Root, r.config.VM, slog.New(slog.DiscardHandler))
	p := r.pod("clone", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations[annotations.Prefix+"template"], c.Annotations[annotations.Prefix+"scratch-disks"] = "cloud-init", "/dev/scratch=1Mi"
	})
	name := hashOf("test\x00key")[:32]
	dir := filepath.Join(r.config.Root, "templates", name)
	r.must(os.MkdirAll(dir, 0o700))
	made, err := json.Marshal(templates.Template{Name: name, Namespace: "test", Scope: r.config.VM.TemplateScope})
	r.must(err)
	r.must(os.WriteFile(filepath.Join(dir, "template.json"), made, 0o600))
	for _, file := range []string{"root.qcow2", "scratch0.qcow2"} {
		r.must(os.WriteFile(filepath.Join(dir, file), []byte("the template's"), 0o600))
	}
	r.Backend.templates.Start(t.Context())
	c := r.create(p, "disk")
	h, err := r.ledger.Get(p.ID, c.ID)
	r.must(err)
	if s, _ := h.Snapshot(); s.Definition.Saved != dir || !s.Definition.Plug {
		t.Fatalf("definition: got %+v, want a machine that continues from %s", s.Definition, dir)
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	s, _ := h.Snapshot()
	if status := s.Status(); status.State != sandbox.StateRunning || s.Definition.Saved != "" || s.Renew ||
		r.driver.guest(c.ID).definition.Saved != "" {
		t.Errorf("state: got %+v, want a running machine that has booted", s)
	}
	for _, file := range []string{r.config.overlayFile(c.ID), r.config.ScratchFile(c.ID, "scratch0")} {
		if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw), "QFI\xfb") {
			t.Errorf("disk %s: got %.20q, error %v, want a new qcow2 image", file, raw, err)
		}
	}
	if list, err := templates.List(r.config.Root); err != nil || len(list) != 1 || list[0].Name != name {
		t.Errorf("templates after a failure: got %+v, error %v, want that %s is kept", list, err, name)
	}
}

// TestNoTemplate: what a template cannot have is refused to machines that ask for one.
func TestNoTemplate(t *testing.T) {
	backend := func() *Backend {
		b := &Backend{cfg: settings{Driver: &hypervisor{}, AgentDisk: "/agent"}}
		b.cfg.VM.Templates = 1
		return b
	}
	for want, change := range map[string]func(b *Backend, o *plan){
		"":             func(*Backend, *plan) {},
		"keeps none":   func(b *Backend, _ *plan) { b.cfg.VM.Templates = 0 },
		"no agent":     func(b *Backend, _ *plan) { b.cfg.AgentDisk = "" },
		"root disk":    func(_ *Backend, o *plan) { o.cdrom = true },
		"not a copy":   func(_ *Backend, o *plan) { o.volumes.Root = "/dev/sdb" },
		"block device": func(_ *Backend, o *plan) { o.volumes.Disks = []machine.Disk{{ID: "disk0"}} },
		"system UUID":  func(_ *Backend, o *plan) { o.options.SystemUUID = "01234567-89ab-cdef-0123-456789abcdef" },
		"UEFI":         func(_ *Backend, o *plan) { o.uefi = &machine.UEFI{} },
		"virtio-fs":    func(_ *Backend, o *plan) { o.volumes.Shares = []machine.Share{{Driver: machine.Share9p}} },
	} {
		b, o := backend(), &plan{files: &disk.Files{Disk: os.Stdin}}
		change(b, o)
		if got := b.noTemplate(o, 0); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("got %q, want it to say %q", got, want)
		}
	}
	if got := backend().noTemplate(&plan{files: &disk.Files{Disk: os.Stdin}}, cloudInitRoom+1); !strings.Contains(got, "bytes") {
		t.Errorf("a large cloud-init image: got %q", got)
	}
}
