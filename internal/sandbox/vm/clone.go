package vm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/renewal"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
)

// This file has what disk machines do with templates, if their pods ask for one by an annotation. The machine of a template has
// the pod's user-data, but boots as an instance of its own, without a network. A copy of it becomes the pod's instance when
// cloud-init runs again with the pod's own cloud-init image, which has taken the place of the template's.

var (
	fpCopied  = failpoint.New("vm-template.copied")
	fpRenewed = failpoint.New("vm-template.renewed")
)

const (
	// cloudInitRoom is the size in bytes of the cloud-init images of machines that can continue from a template. The guest does
	// not notice that the disk is another one, so the size must be the same.
	cloudInitRoom = 4 << 20
	// minShares is the least share of the CPUs that a cgroup can have.
	minShares = 2
)

// templateKind returns what is special about templates of disk machines.
func (b *Backend) templateKind() templates.Kind {
	return templates.Kind{
		Handler: "vm", Unit: b.templateUnit, Settle: b.settle,
		Size: func(memory uint64) uint64 { return memory },
		Time: 20 * time.Minute, // an emulated system boots for minutes
	}
}

// forTemplate prepares the cloud-init image of a machine that can continue from a template, and sets plan.like. If the machine
// cannot, there is a warning.
func (b *Backend) forTemplate(o *plan, in cloudinit.Input, built *cloudinit.Image) error {
	if why := b.noTemplate(o, len(built.Bytes)); why != "" {
		o.warnings = append(o.warnings, "annotation "+annotations.Prefix+"template has no effect: "+why)
		return nil
	}
	common, err := cloudinit.Build(in.Neutral())
	if err != nil {
		return fmt.Errorf("cloud-init: %w", err)
	}
	sum := sha256.Sum256(common.Bytes)
	o.like = hex.EncodeToString(sum[:])
	built.Bytes = append(built.Bytes, make([]byte, cloudInitRoom-len(built.Bytes))...)
	return nil
}

// noTemplate says why a machine cannot continue from a template.
func (b *Backend) noTemplate(o *plan, cloudInit int) string {
	switch {
	case b.cfg.VM.Templates == 0:
		return "the node keeps none (vm.templates)"
	case b.cfg.Driver.Name() == DriverLibvirt:
		return `machines of vm.driver "libvirt" do not continue from a template`
	case b.cfg.AgentDisk == "":
		return "the node has no agent for guests"
	case o.cdrom || o.files.Disk == nil || o.volumes.Root != "":
		return "the root disk is not a copy of the image's"
	case len(o.volumes.Disks) > len(o.options.ScratchDisks):
		return "the machine has block devices"
	case o.options.SystemUUID != "":
		return "the guest would have the system UUID of the template"
	case cloudInit > cloudInitRoom:
		return fmt.Sprintf("the cloud-init image has %d bytes, more than %d", cloudInit, cloudInitRoom)
	}
	if err := machine.CheckSaved(machine.Definition{UEFI: o.uefi, NICs: make([]machine.NIC, len(o.interfaces)),
		Shares: o.volumes.Shares}); err != nil {
		return err.Error()
	}
	return ""
}

// markDisks sets Disk.Like of the disks that a template has, too: their content is that of the image, and changes.
func (o *plan) markDisks(disks []machine.Disk) {
	sizes := map[string]uint64{rootID: max(o.options.RootVolumeSize, o.files.VirtualSize)}
	for i, disk := range o.options.ScratchDisks {
		sizes[fmt.Sprintf("scratch%d", i)] = disk.Size
	}
	for i := range disks {
		disks[i].Like = strconv.FormatUint(sizes[disks[i].ID], 10)
	}
}

// chooseTemplate makes a machine that is about to be defined continue from a template, if it can and there is one.
func (b *Backend) chooseTemplate(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
	switch {
	case b.cfg.Continue != nil:
		return b.cfg.Continue(ctx, p, d)
	case b.templates != nil && d.Plug && !isTemplate(p):
		return b.templates.Find(ctx, p, d)
	}
	return nil
}

// templateLabel marks the pod of a template's machine.
const templateLabel = annotations.Prefix + "template"

func isTemplate(p *sandbox.Pod) bool { return p.Config.GetLabels()[templateLabel] != "" }

// templateUnit is templateKind.unit.
func (b *Backend) templateUnit(w templates.Wish) (*sandbox.Pod, *sandbox.Container) {
	annotated := b.cfg.Annotations.Pick(w.Pod.Config.GetAnnotations())
	for _, own := range []string{
		"ssh-keys", "VirtletSSHKeys", "ssh-key-source", "VirtletSSHKeySource", "files-from-data-source", "VirtletFilesFromDataSource",
		"vcpu-count", "VirtletVCPUCount",
	} {
		delete(annotated, own)
		delete(annotated, annotations.Prefix+own)
	}
	annotated[annotations.Prefix+"wait-for-agent"], annotated[annotations.Prefix+"vcpu-count"] = "true", strconv.Itoa(w.CPUs)
	res := proto.CloneOf(sandbox.Resources(w.Pod, w.Container))
	if res == nil {
		res = &runtimeapi.LinuxContainerResources{}
	}
	res.CpuShares = minShares // pods come first
	mp := *w.Pod
	mp.Config = &runtimeapi.PodSandboxConfig{
		Annotations: annotated, Labels: map[string]string{templateLabel: w.Name}, Linux: &runtimeapi.LinuxPodSandboxConfig{},
	}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "machine"}, Image: w.Container.Config.GetImage(), Args: w.Container.Config.GetArgs(),
		Linux: &runtimeapi.LinuxContainerConfig{Resources: res},
	}
	return &mp, &sandbox.Container{ImageID: w.Container.ImageID, Config: config}
}

// settle is templateKind.settle.
func (b *Backend) settle(ctx context.Context, id string) error {
	_, l, err := b.ledger.GetRun(id, id)
	if err != nil {
		return err
	}
	a := l.agent.Load()
	if a == nil {
		return fmt.Errorf("%w: %w", ErrNoAgent, errdefs.ErrUnavailable)
	}
	return renewal.Settle(ctx, a)
}

// renew makes a guest that has continued from a template the pod's: it gets its clock, random numbers and machine ID at once,
// and the rest when cloud-init runs again.
func (b *Backend) renew(ctx context.Context, h *handle, l *life) error {
	s, _ := h.Snapshot()
	var macs []string
	for _, nic := range s.Definition.NICs {
		macs = append(macs, nic.MAC)
	}
	if err := renewal.Renew(ctx, l.agent.Load(), s.Definition.UUID, macs); err != nil {
		return err
	}
	if err := fpRenewed.Hit(ctx); err != nil {
		return err
	}
	_, err := h.Update(l, func(s *state) { s.Renew = false })
	return err
}

// continueFrom starts a machine that continues from a template. All errors of the template's have machine.ErrSaved.
func (b *Backend) continueFrom(ctx context.Context, h *handle, l *life, d machine.Definition) error {
	limited, cancel := context.WithTimeoutCause(ctx, templates.StartTime,
		fmt.Errorf("the guest did not continue within %s", templates.StartTime))
	defer cancel()
	if err := b.templates.CopyDisks(d); err != nil {
		return fmt.Errorf("%w: %w", machine.ErrSaved, err)
	}
	if err := fpCopied.Hit(ctx); err != nil {
		return err
	}
	actual, err := b.startDriver(limited, h)
	if err != nil {
		return err
	}
	if _, err := b.booted(h, l, actual); err != nil || actual.Phase != machine.Running {
		return err
	}
	if err := b.renew(limited, h, l); err != nil {
		return fmt.Errorf("%w: %w", machine.ErrSaved, err)
	}
	return nil
}

// renewLate is renew after a restart of the daemon. A guest that cannot get to know its pod is killed.
func (b *Backend) renewLate(h *handle, l *life) {
	ctx, cancel := context.WithTimeout(b.ctx, templates.StartTime)
	defer cancel()
	err := b.renew(ctx, h, l)
	if err == nil || b.ctx.Err() != nil {
		return
	}
	b.log.Error("killing a machine that continues from a template", "container", h.ID, "err", err)
	undo, cancel := context.WithTimeout(b.ctx, cleanupTime)
	defer cancel()
	if err := errors.Join(l.console.Note("tripod: the machine continues from a template, but does not know its pod, and is killed: "+err.Error()), b.force(undo, h, l)); err != nil {
		b.log.Error("cannot kill a machine that continues from a template", "container", h.ID, "err", err)
	}
}

// templateOf returns the name of the template from which a machine continues, or "".
func templateOf(h *handle) string {
	s, _ := h.Snapshot()
	return templates.Of(s.Definition)
}

// bootInstead boots a machine that did not continue from its template. Its disks become new ones, after the record says that it
// boots: a machine must not continue with disks to which it has written.
func (b *Backend) bootInstead(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle, l *life, cause error) error {
	b.log.Warn("a machine cannot continue from its template and boots instead", "container", h.ID, "template", templateOf(h), "err", cause)
	if err := b.undoStart(ctx, h, l, cause); err != nil {
		return err
	}
	s, _ := h.Snapshot()
	d := s.Definition
	d.Saved = ""
	if err := b.cfg.Driver.Define(ctx, d); err != nil {
		return fmt.Errorf("define the machine: %w", err)
	}
	if err := h.Set(func(s *state) { s.Definition.Saved = "" }); err != nil {
		return err
	}
	for _, disk := range d.Disks {
		if disk.ReadOnly {
			continue
		}
		size, err := strconv.ParseUint(disk.Like, 10, 64)
		if err == nil {
			err = os.RemoveAll(disk.Path)
		}
		if err == nil {
			err = qcow2.CreateOverlay(ctx, disk.Path, size, qcow2.Overlay{})
		}
		if err != nil {
			return sandbox.DiskError(fmt.Errorf("make disk %s: %w", disk.ID, err))
		}
	}
	return b.StartContainer(ctx, p, c)
}

// startedFrom records from where a machine was started, which can be one for which a template is wanted.
func (b *Backend) startedFrom(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) {
	s, _ := h.Snapshot()
	switch {
	case b.templates == nil || !s.Definition.Plug || isTemplate(p):
	case s.Definition.Saved != "":
		template := templates.Of(s.Definition)
		b.log.Info("a machine has continued from a template", "container", h.ID, "template", template)
		b.templates.Continued(template)
	default:
		b.templates.Want(ctx, p, c)
	}
}
