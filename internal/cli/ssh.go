package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sshOptions are the flags of ssh.
type sshOptions struct {
	user, port, identity string
}

func (a *App) sshCommand() *cobra.Command {
	var o sshOptions
	c := &cobra.Command{
		Use: "ssh POD [-- COMMAND...]", Short: "Open an SSH session to a virtual machine or another pod and exit with its exit code",
		Long: `Ssh runs the program ssh (openssh-client), whose connection leads over the node's CRI socket to an SSH server in the pod: the pod
needs no address that is reachable from here. The configuration, the keys and the agent of ssh apply as always, but each session
has a connection of its own (ControlPath does not apply).

The host key of each port of a pod is accepted when ssh sees it first and must not change afterwards. It is kept below the user's
cache directory until the pod is gone, so that a new machine can have a new key.`,
		Example: "  tripod ssh debian -l debian\n" +
			"  tripod ssh debian -l debian -i ~/.ssh/machines -- systemctl status nginx",
		Args: onePodAndCommand, ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error {
			var id, known string
			err := a.withClient(c, func(ctx context.Context, client *Client) (err error) {
				if id, err = client.runningPod(ctx, args[0]); err != nil {
					return err
				}
				known, err = client.knownHosts(ctx, id)
				return err
			})
			if err != nil {
				return err
			}
			return a.ssh(c.Context(), id, append(o.arguments(id, known), args...))
		},
	}
	c.Flags().StringVarP(&o.user, "user", "l", "", "the user in the pod (default: as ssh's configuration says)")
	c.Flags().StringVarP(&o.port, "port", "p", "", "the server's port in the pod (default: as ssh's configuration says, or 22)")
	c.Flags().StringVarP(&o.identity, "identity", "i", "", "a file with a private key")
	return c
}

// onePodAndCommand accepts one argument before a --, and any after it.
func onePodAndCommand(c *cobra.Command, args []string) error {
	pods := len(args)
	if n := c.ArgsLenAtDash(); n >= 0 {
		pods = n
	}
	if pods != 1 {
		return errors.New("name one pod, and put a command after --: tripod ssh POD -- COMMAND")
	}
	return nil
}

// runningPod returns the ID of a pod. It returns errdefs.ErrFailedPrecondition if nothing runs in the pod.
func (c *Client) runningPod(ctx context.Context, arg string) (string, error) {
	id, err := c.Pod(ctx, arg)
	if err != nil {
		return "", err
	}
	resp, err := c.PodSandboxStatus(ctx, id, false)
	if err != nil {
		return "", err
	}
	if resp.GetStatus().GetState() != runtimeapi.PodSandboxState_SANDBOX_READY {
		return "", fmt.Errorf("pod %s is not running: it has been stopped: %w", arg, errdefs.ErrFailedPrecondition)
	}
	running, err := c.runningContainers(ctx, id)
	if err == nil && len(running) == 0 {
		err = fmt.Errorf("pod %s is not running: none of its containers runs; see `tripod ps -a`: %w", arg, errdefs.ErrFailedPrecondition)
	}
	return id, err
}

// knownHosts returns the path for a pod's host keys, without the suffix for the port. It removes the files of pods that
// are gone. The pods of each endpoint have a directory of their own, because an endpoint does not know other pods.
func (c *Client) knownHosts(ctx context.Context, pod string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no directory for host keys: %w", err)
	}
	host, err := hostIdentity()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "tripod", "known_hosts", fmt.Sprintf("%x", sha256.Sum256([]byte(host+" "+c.Endpoint))))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	files, err := os.ReadDir(dir) // before the pods, so that each file of a running pod finds it in the list
	if err != nil {
		return "", err
	}
	pods, err := c.ListPodSandbox(ctx, nil)
	if err != nil {
		return "", err
	}
	for _, f := range files {
		if !slices.ContainsFunc(pods, func(p *runtimeapi.PodSandbox) bool { return strings.HasPrefix(f.Name(), p.GetId()+"-") }) {
			_ = os.Remove(filepath.Join(dir, f.Name())) // a file that stays does no harm
		}
	}
	return filepath.Join(dir, pod), nil
}

// hostIdentity returns what tells this host from others that share the user's home directory.
func hostIdentity() (string, error) {
	id, err := os.ReadFile("/etc/machine-id")
	if id = bytes.TrimSpace(id); err == nil && len(id) > 0 {
		return string(id), nil
	}
	return os.Hostname()
}

// The variables that tell the proxy command of ssh what it is to do. The shell that runs the command does not look into
// them, so they need no quotes.
const (
	sshProgram  = "TRIPOD_SSH_PROGRAM"
	sshPod      = "TRIPOD_SSH_POD"
	sshProxyFor = `ProxyCommand="$` + sshProgram + `" port-forward --stdio "$` + sshPod + `" %p`
)

// arguments returns the arguments of ssh before the host. Only ssh knows the port, because its configuration can say
// it: ssh replaces %p, so that each port has a file of host keys. A shared connection (ControlPath) could be one to
// another endpoint's pod of the same name.
func (o *sshOptions) arguments(pod, known string) []string {
	args := []string{
		"-o", sshProxyFor, "-o", "ControlPath=none", "-o", "HostKeyAlias=" + pod, "-o", "StrictHostKeyChecking=accept-new",
		"-o", `UserKnownHostsFile="` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `%`, `%%`).Replace(known) + `-%p"`,
	}
	for _, f := range []struct{ name, value string }{{"-l", o.user}, {"-p", o.port}, {"-i", o.identity}} {
		if f.value != "" {
			args = append(args, f.name, f.value)
		}
	}
	return append(args, "--")
}

// ssh replaces this process with ssh, which so has our terminal to itself: a shell that waits for us sees that ssh has
// stopped (~^Z), and its exit code or signal is ours.
func (a *App) ssh(ctx context.Context, pod string, args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	program, err := exec.LookPath("ssh")
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("there is no program ssh in PATH; it is in the package openssh-client (Debian) or openssh-clients (Fedora): %w",
			errdefs.ErrUnavailable)
	}
	if err != nil {
		return err
	}
	run := a.exec
	if run == nil {
		run = unix.Exec
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	c := exec.Cmd{Env: append(os.Environ(), sshProgram+"="+self, sshPod+"="+pod, EndpointVariable+"="+a.endpoint)}
	if err := run(program, append([]string{"ssh"}, args...), c.Environ()); err != nil { // each variable once: ssh would take the first
		return fmt.Errorf("run %s: %w", program, err)
	}
	return nil
}
