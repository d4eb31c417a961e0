package linux

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/sandbox"
	"github.com/tripod-run/tripod/sandbox/linux/spec"
)

// shmSize is the size of a pod's /dev/shm, as everybody has it: 64 MiB.
const shmSize = "67108864"

// podFiles are the files that the pod's containers share.
type podFiles struct{ resolvConf, hosts, hostname, shm string }

// filesOf tells where the pod's files are, from its configuration alone.
func filesOf(p *sandbox.Pod, runDir string) podFiles {
	f := podFiles{
		resolvConf: filepath.Join(runDir, "resolv.conf"),
		hosts:      filepath.Join(runDir, "hosts"),
		hostname:   filepath.Join(runDir, "hostname"),
		shm:        filepath.Join(runDir, "shm"),
	}
	if spec.PodModes(p).IPC == runtimeapi.NamespaceMode_NODE {
		f.shm = "/dev/shm"
	}
	return f
}

// makeFiles writes the files and mounts the pod's /dev/shm.
func makeFiles(p *sandbox.Pod, f podFiles, ownShm bool) error {
	resolv, err := resolvConf(p.Config.GetDnsConfig())
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
	for _, file := range []struct {
		path    string
		content []byte
	}{{f.resolvConf, resolv}, {f.hosts, hosts}, {f.hostname, []byte(name + "\n")}} {
		if err := writeFile(file.path, file.content, 0o644); err != nil {
			return err
		}
	}
	if !ownShm {
		return nil
	}
	return mountShm(f.shm)
}

func mountShm(dir string) error {
	if err := unmount(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	flags := uintptr(unix.MS_NOEXEC | unix.MS_NOSUID | unix.MS_NODEV)
	if err := unix.Mount("shm", dir, "tmpfs", flags, "mode=1777,size="+shmSize); err != nil {
		return fmt.Errorf("mount the pod's /dev/shm: %w", err)
	}
	return nil
}

// resolvConf is resolv.conf(5) from the request, or the node's when the request says nothing.
func resolvConf(dns *runtimeapi.DNSConfig) ([]byte, error) {
	if len(dns.GetServers())+len(dns.GetSearches())+len(dns.GetOptions()) == 0 {
		return orNothing(os.ReadFile("/etc/resolv.conf"))
	}
	var b strings.Builder
	if len(dns.Searches) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(dns.Searches, " "))
	}
	for _, server := range dns.Servers {
		fmt.Fprintf(&b, "nameserver %s\n", server)
	}
	if len(dns.Options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(dns.Options, " "))
	}
	return []byte(b.String()), nil
}

// hostsFile is /etc/hosts of pods whose caller mounts none (the kubelet does): loopback and the pod's own name, or the
// node's file on host network.
func hostsFile(p *sandbox.Pod) ([]byte, error) {
	if !spec.PodModes(p).UTS() {
		return orNothing(os.ReadFile("/etc/hosts"))
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

func orNothing(content []byte, err error) ([]byte, error) {
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return content, err
}

// mountedOn tells whether something is mounted on the directory itself.
func mountedOn(dir string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	return err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}
