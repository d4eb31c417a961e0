package vm

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
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
	r.templates = newTemplates(r.Backend, r.templateKind(), r.config.Config, slog.New(slog.DiscardHandler))
	r.templates.load(t.Context())
	p := r.pod("clone", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations[annotations.Prefix+"template"], c.Annotations[annotations.Prefix+"scratch-disks"] = "cloud-init", "/dev/scratch=1Mi"
	})
	name, err := r.templates.name(t.Context(), "test", machine.Definition{})
	r.must(err)
	dir := filepath.Join(templatesDir(r.config.Root), name)
	r.must(os.MkdirAll(dir, 0o700))
	for _, file := range []string{templateFile, "root.qcow2", "scratch0.qcow2"} {
		r.must(os.WriteFile(filepath.Join(dir, file), []byte("the template's"), 0o600))
	}
	r.templates.have[name] = &Template{Name: name}
	c := r.create(p, "disk")
	h, err := r.ledger.Get(p.ID, c.ID)
	r.must(err)
	if s, _ := h.Snapshot(); s.Definition.Saved != dir || !s.Definition.Plug {
		t.Fatalf("definition: got %+v, want a machine that continues from %s", s.Definition, dir)
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	s, _ := h.Snapshot()
	if status := s.Status(); status.State != sandbox.StateRunning || s.Definition.Saved != "" || s.Renew || r.driver.guest(c.ID).definition.Saved != "" {
		t.Errorf("state: got %+v, want a running machine that has booted", s)
	}
	for _, file := range []string{r.config.overlayFile(c.ID), r.config.scratchFile(c.ID, "scratch0")} {
		if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw), "QFI\xfb") {
			t.Errorf("disk %s: got %.20q, error %v, want a new qcow2 image", file, raw, err)
		}
	}
	if one := r.templates.have[name]; one == nil || one.failures != 1 {
		t.Errorf("template after a failure: got %+v, want that it is kept, with one failure", one)
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
		"not a copy":   func(_ *Backend, o *plan) { o.volumes.root = "/dev/sdb" },
		"block device": func(_ *Backend, o *plan) { o.volumes.disks = []machine.Disk{{ID: "disk0"}} },
		"system UUID":  func(_ *Backend, o *plan) { o.options.SystemUUID = "01234567-89ab-cdef-0123-456789abcdef" },
		"UEFI":         func(_ *Backend, o *plan) { o.uefi = &machine.UEFI{} },
		"virtio-fs":    func(_ *Backend, o *plan) { o.volumes.shares = []machine.Share{{Driver: machine.Share9p}} },
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

// TestNeutral: machines share a template whatever their names, keys, environment, networks and volumes are, but not if their user
// data differ.
func TestNeutral(t *testing.T) {
	build := func(change func(*cloudinit.Input)) string {
		in := cloudinit.Input{Options: annotations.Options{ImageType: annotations.NoCloud}, PodUID: "uid", Hostname: "name", Agent: true}
		change(&in)
		made, err := cloudinit.Build(neutral(in))
		if err != nil {
			t.Fatal(err)
		}
		return string(made.Bytes)
	}
	plain := build(func(*cloudinit.Input) {})
	for what, c := range map[string]struct {
		change func(*cloudinit.Input)
		same   bool
	}{
		"own": {func(in *cloudinit.Input) {
			in.PodUID, in.Hostname, in.Env = "other", "other", []cloudinit.EnvVar{{Name: "A", Value: "secret"}}
			in.Options.SSHKeys, in.DNS.Servers = []string{"ssh-ed25519 AAAA"}, []string{"10.0.0.1"}
			in.Mounts = []cloudinit.Mount{{HostPath: "/a", ContainerPath: "/b"}}
		}, true},
		"user data": {func(in *cloudinit.Input) { in.Options.UserData = map[string]any{"packages": []any{"nginx"}} }, false},
		"script":    {func(in *cloudinit.Input) { in.Options.UserDataScript = "#!/bin/sh\n" }, false},
		"meta-data": {func(in *cloudinit.Input) { in.Options.MetaData = map[string]any{"zone": "a"} }, false},
		"form":      {func(in *cloudinit.Input) { in.Options.ImageType = annotations.ConfigDrive }, false},
		"agent":     {func(in *cloudinit.Input) { in.Agent = false }, false},
	} {
		if same := build(c.change) == plain; same != c.same {
			t.Errorf("%s: the same template: got %t, want %t", what, same, c.same)
		}
	}
}
