package vm

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/identity"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
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
	// outputLimit is how many bytes of a script's output are read, and quoteLimit how many an error quotes.
	outputLimit, quoteLimit = 32 << 10, 1 << 10
)

// templateKind returns what is special about templates of disk machines.
func (b *Backend) templateKind() templateKind {
	return templateKind{
		handler: "vm", unit: b.templateUnit, settle: b.settle,
		size: func(memory uint64) uint64 { return memory },
		time: 20 * time.Minute, // an emulated system boots for minutes
	}
}

// forTemplate prepares the cloud-init image of a machine that can continue from a template, and sets plan.like. If the machine
// cannot, there is a warning.
func (b *Backend) forTemplate(o *plan, in cloudinit.Input, built *cloudinit.Image) error {
	if why := b.noTemplate(o, len(built.Bytes)); why != "" {
		o.warnings = append(o.warnings, "annotation "+annotations.Prefix+"template has no effect: "+why)
		return nil
	}
	common, err := cloudinit.Build(neutral(in))
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
	case b.cfg.Driver.Name() == driverLibvirt:
		return `machines of vm.driver "libvirt" do not continue from a template`
	case b.cfg.AgentDisk == "":
		return "the node has no agent for guests"
	case o.cdrom || o.files.Disk == nil || o.volumes.root != "":
		return "the root disk is not a copy of the image's"
	case len(o.volumes.disks) > len(o.options.ScratchDisks):
		return "the machine has block devices"
	case o.options.SystemUUID != "":
		return "the guest would have the system UUID of the template"
	case cloudInit > cloudInitRoom:
		return fmt.Sprintf("the cloud-init image has %d bytes, more than %d", cloudInit, cloudInitRoom)
	}
	if err := machine.CheckSaved(machine.Definition{UEFI: o.uefi, NICs: make([]machine.NIC, len(o.interfaces)), Shares: o.volumes.shares}); err != nil {
		return err.Error()
	}
	return ""
}

// neutral returns the part of the input for which machines need different templates.
func neutral(in cloudinit.Input) cloudinit.Input {
	options := annotations.Options{
		ImageType: in.Options.ImageType, UserData: in.Options.UserData, UserDataDocument: in.Options.UserDataDocument,
		UserDataScript: in.Options.UserDataScript, MetaData: in.Options.MetaData,
	}
	return cloudinit.Input{Options: options, PodUID: "template", Hostname: "template", Agent: in.Agent}
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
		return b.templates.find(ctx, p, d)
	}
	return nil
}

// templateLabel marks the pod of a template's machine.
const templateLabel = annotations.Prefix + "template"

func isTemplate(p *sandbox.Pod) bool { return p.Config.GetLabels()[templateLabel] != "" }

// templateUnit is templateKind.unit.
func (b *Backend) templateUnit(w wish) (*sandbox.Pod, *sandbox.Container) {
	annotated := b.cfg.Annotations.Pick(w.pod.Config.GetAnnotations())
	for _, own := range []string{
		"ssh-keys", "VirtletSSHKeys", "ssh-key-source", "VirtletSSHKeySource", "files-from-data-source", "VirtletFilesFromDataSource",
		"vcpu-count", "VirtletVCPUCount",
	} {
		delete(annotated, own)
		delete(annotated, annotations.Prefix+own)
	}
	annotated[annotations.Prefix+"wait-for-agent"], annotated[annotations.Prefix+"vcpu-count"] = "true", strconv.Itoa(w.cpus)
	res := proto.CloneOf(sandbox.Resources(w.pod, w.container))
	if res == nil {
		res = &runtimeapi.LinuxContainerResources{}
	}
	res.CpuShares = minShares // pods come first
	mp := *w.pod
	mp.Config = &runtimeapi.PodSandboxConfig{
		Annotations: annotated, Labels: map[string]string{templateLabel: w.name}, Linux: &runtimeapi.LinuxPodSandboxConfig{},
	}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "machine"}, Image: w.container.Config.GetImage(), Args: w.container.Config.GetArgs(),
		Linux: &runtimeapi.LinuxContainerConfig{Resources: res},
	}
	return &mp, &sandbox.Container{ImageID: w.container.ImageID, Config: config}
}

// settleScript waits until cloud-init and the services that the system starts are ready.
const settleScript = `command -v cloud-init >/dev/null || { echo "the guest has no cloud-init" >&2; exit 1; }
until [ -e /run/cloud-init/result.json ]; do sleep 0.2 || sleep 1; done
[ ! -d /run/systemd/system ] || systemctl is-system-running --wait >/dev/null || true
sync`

// settle is templateKind.settle.
func (b *Backend) settle(ctx context.Context, id string) error {
	_, l, err := b.ledger.GetRun(id, id)
	if err != nil {
		return err
	}
	return runScript(ctx, l, nil, settleScript)
}

// runScript runs a shell script in the guest, with arguments and input. Its error is errdefs.ErrUnavailable if the agent does
// not answer, and otherwise quotes what the script wrote to its standard error.
func runScript(ctx context.Context, l *life, input []byte, script string, args ...string) error {
	a := l.agent.Load()
	if a == nil {
		return fmt.Errorf("%w: %w", errNoAgent, errdefs.ErrUnavailable)
	}
	if err := a.Wait(ctx); err != nil {
		return err
	}
	words := &limitedBuffer{limit: outputLimit}
	code, err := a.Exec(ctx, agent.Command{Dir: "/", ExecRequest: sandbox.ExecRequest{
		Cmd: append([]string{"/bin/sh", "-c", script, "tripod"}, args...), Stdin: bytes.NewReader(input), Stderr: words,
	}})
	if err == nil && code != 0 {
		said := words.String()
		err = fmt.Errorf("a script in the guest has failed with code %d: %q: %w", code, said[:min(len(said), quoteLimit)], errdefs.ErrFailedPrecondition)
	}
	return err
}

// renewScript makes a guest that has continued from a template the pod's. Its arguments are the node's time in nanoseconds, the
// guest's machine ID, and the MAC addresses of its interfaces; the input is the seed for Renew. The rest runs on while the
// container counts as started, as cloud-init does in a guest that boots.
//
// In /run/cloud-init stays only what the system makes at a boot before cloud-init runs; otherwise cloud-init would trust what it
// has found out about the template's instance. At a boot, the system brings the network up between the first two stages. Here
// the second stage does, because it takes itself for the first one that sees the instance.
const renewScript = `set -e
/proc/$PPID/exe renew "$1"
[ ! -s /etc/machine-id ] || echo "$2" >/etc/machine-id || true
shift 2
for file in /run/cloud-init/* /run/cloud-init/.[!.]*; do
	case ${file##*/} in enabled | cloud.cfg | ds-identify.log | cloud-init-generator.log) ;; *) rm -rf "$file" ;; esac
done
again='for mac; do
	for i in $(seq 200); do ! grep -qix "$mac" /sys/class/net/*/address || break; sleep 0.1 || sleep 1; done
done
cloud-init init --local
rm -f /var/lib/cloud/data/instance-id
cloud-init init
cloud-init modules --mode=config
cloud-init modules --mode=final
for unit in ssh sshd; do
	! command -v systemctl >/dev/null || systemctl try-restart "$unit"
done'
if [ -d /run/systemd/system ] && command -v systemd-run >/dev/null; then
	systemctl is-active -q tripod-renew || systemd-run --quiet --collect --no-block --unit=tripod-renew /bin/sh -c "$again" tripod "$@"
else
	setsid /bin/sh -c "$again" tripod "$@" </dev/null >/dev/console 2>&1 &
fi`

// renew makes a guest that has continued from a template the pod's: it gets its clock, random numbers and machine ID at once,
// and the rest when cloud-init runs again.
func (b *Backend) renew(ctx context.Context, h *handle, l *life) error {
	s, _ := h.Snapshot()
	if err := l.agent.Load().Wait(ctx); err != nil { // before the time is taken
		return err
	}
	seed := make([]byte, identity.SeedSize)
	rand.Read(seed)
	args := []string{strconv.FormatInt(time.Now().UnixNano(), 10), strings.ReplaceAll(s.Definition.UUID, "-", "")}
	for _, nic := range s.Definition.NICs {
		args = append(args, nic.MAC)
	}
	if err := runScript(ctx, l, seed, renewScript, args...); err != nil {
		return fmt.Errorf("prepare the guest for its pod: %w", err)
	}
	if err := fpRenewed.Hit(ctx); err != nil {
		return err
	}
	_, err := h.Update(l, func(s *state) { s.Renew = false })
	return err
}

// continueFrom starts a machine that continues from a template. All errors of the template's have machine.ErrSaved.
func (b *Backend) continueFrom(ctx context.Context, h *handle, l *life, d machine.Definition) error {
	limited, cancel := context.WithTimeoutCause(ctx, cloneTime, fmt.Errorf("the guest did not continue within %s", cloneTime))
	defer cancel()
	if err := b.templates.copyDisks(d); err != nil {
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
	ctx, cancel := context.WithTimeout(b.ctx, cloneTime)
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
	if s.Definition.Saved == "" {
		return ""
	}
	return filepath.Base(s.Definition.Saved)
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
		template := filepath.Base(s.Definition.Saved)
		b.log.Info("a machine has continued from a template", "container", h.ID, "template", template)
		b.templates.continued(template)
	default:
		b.templates.want(ctx, p, c)
	}
}
