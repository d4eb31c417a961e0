package shared

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

const (
	// shmSize is the size of a pod's /dev/shm in bytes, the same as in other runtimes.
	shmSize = 64 << 20
	// etcSpare is the number of bytes that containers can add to the pod's files for /etc.
	etcSpare = 1 << 20
	// etcInodes limits the files and extended attributes on the tmpfs for these files. The tmpfs needs inodes for its
	// root directory, the three files, and a second copy of each file while the file is replaced.
	etcInodes = 16
)

// Files are the paths of the files that the pod's containers share. Containers can write to them, so they are on two
// tmpfs of the pod. These are limited in size, charged to the writer's cgroup, and separate from the node's file
// systems (fault C10).
type Files struct {
	Etc                         string // the tmpfs that contains the next three files
	ResolvConf, Hosts, Hostname string
	Shm                         string
}

// FilesOf derives the paths of the pod's files from its configuration.
func FilesOf(p *sandbox.Pod, runDir string) Files {
	etc := filepath.Join(runDir, "etc")
	f := Files{
		Etc:        etc,
		ResolvConf: filepath.Join(etc, "resolv.conf"),
		Hosts:      filepath.Join(etc, "hosts"),
		Hostname:   filepath.Join(etc, "hostname"),
		Shm:        filepath.Join(runDir, "shm"),
	}
	if spec.PodModes(p).IPC == runtimeapi.NamespaceMode_NODE {
		f.Shm = "/dev/shm"
	}
	return f
}

// MakeShm mounts the pod's /dev/shm, unless the pod shares the node's. options are more options of the tmpfs, each after
// a comma.
func (f Files) MakeShm(p *sandbox.Pod, options string) error {
	if spec.PodModes(p).IPC == runtimeapi.NamespaceMode_NODE {
		return nil
	}
	if err := mnt.Tmpfs(f.Shm, fmt.Sprintf("mode=1777,size=%d%s%s", shmSize, ownerOptions(p), options)); err != nil {
		return fmt.Errorf("the pod's /dev/shm: %w", err)
	}
	return nil
}

// MakeEtc writes the files for /etc on a new tmpfs. It replaces an existing mount. options are more options of the tmpfs,
// each after a comma. Notices about the pod's DNS configuration go to the log.
func (f Files) MakeEtc(p *sandbox.Pod, options string, log *slog.Logger) error {
	resolv, err := resolvConf(p, log)
	if err != nil {
		return err
	}
	hosts, err := hostsFile(p)
	if err != nil {
		return err
	}
	name := p.Config.GetHostname()
	if !spec.PodModes(p).UTS() || name == "" {
		if name, err = os.Hostname(); err != nil {
			return err
		}
	}
	size := len(resolv) + len(hosts) + etcSpare
	if err := mnt.Tmpfs(f.Etc, fmt.Sprintf("mode=755,size=%d,nr_inodes=%d%s%s", size, etcInodes, ownerOptions(p), options)); err != nil {
		return fmt.Errorf("the pod's files for /etc: %w", err)
	}
	for _, file := range []struct {
		path    string
		content []byte
	}{{f.ResolvConf, resolv}, {f.Hosts, hosts}, {f.Hostname, []byte(name + "\n")}} {
		if err := ledger.ReplaceFile(file.path, file.content, 0o644); err != nil {
			return err
		}
		if err := Chown(p, file.path); err != nil {
			return err
		}
	}
	return nil
}

// ownerOptions returns the options of a tmpfs that belongs to the root of the pod's user namespace.
func ownerOptions(p *sandbox.Pod) string {
	ids := p.IDMap()
	if ids == nil {
		return ""
	}
	return fmt.Sprintf(",uid=%d,gid=%d", ids.Users.First, ids.Groups.First)
}

// Chown gives a file to the root of the pod's user namespace.
func Chown(p *sandbox.Pod, name string) error {
	ids := p.IDMap()
	if ids == nil {
		return nil
	}
	return os.Chown(name, int(ids.Users.First), int(ids.Groups.First))
}

// ResolvConf returns the pod's resolv.conf(5). On the host network it is the node's file, unless the request sets
// something.
func resolvConf(p *sandbox.Pod, log *slog.Logger) ([]byte, error) {
	if !spec.PodModes(p).UTS() && proto.Size(p.Config.GetDnsConfig()) == 0 {
		return ignoreMissing(os.ReadFile(sandbox.ResolvConf))
	}
	dns, notice, err := p.DNS()
	if err != nil {
		return nil, err
	}
	if notice != "" {
		log.Warn(notice, "pod", p.ID)
	}
	var text strings.Builder
	if len(dns.Searches) > 0 {
		fmt.Fprintf(&text, "search %s\n", strings.Join(dns.Searches, " "))
	}
	for _, server := range dns.Servers {
		fmt.Fprintf(&text, "nameserver %s\n", server)
	}
	if len(dns.Options) > 0 {
		fmt.Fprintf(&text, "options %s\n", strings.Join(dns.Options, " "))
	}
	return []byte(text.String()), nil
}

// hostsFile returns the content of /etc/hosts: loopback and the pod's name, or the node's file if the pod is on the
// host network. The kubelet mounts its own file over this one.
func hostsFile(p *sandbox.Pod) ([]byte, error) {
	if !spec.PodModes(p).UTS() {
		return ignoreMissing(os.ReadFile("/etc/hosts"))
	}
	var b strings.Builder
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	if name := p.Config.GetHostname(); name != "" {
		for _, ip := range p.IPs {
			fmt.Fprintf(&b, "%s\t%s\n", ip, name)
		}
	}
	return []byte(b.String()), nil
}

func ignoreMissing(content []byte, err error) ([]byte, error) {
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return content, err
}
