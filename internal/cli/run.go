package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (a *App) runpCommand() *cobra.Command {
	var handler string
	c := &cobra.Command{
		Use: "runp POD-FILE", Short: "Start a pod from a JSON or YAML PodSandboxConfig", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			config := &runtimeapi.PodSandboxConfig{}
			if err := readMessage(args[0], config); err != nil {
				return err
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := client.RunPodSandbox(ctx, config, handler)
				if err == nil {
					fmt.Fprintln(a.Stdout, id)
				}
				return err
			})
		},
	}
	c.Flags().StringVarP(&handler, "runtime", "r", "", "RuntimeClass handler; empty: the node's default")
	a.completeFlag(c, "runtime", handlerWords)
	return c
}

func (a *App) createCommand() *cobra.Command {
	var pull bool
	c := &cobra.Command{
		Use: "create POD CONTAINER-FILE POD-FILE", Short: "Create a container in a pod from a JSON or YAML ContainerConfig",
		Args: cobra.ExactArgs(3),
		RunE: func(c *cobra.Command, args []string) error {
			container, pod, err := readConfigs(args[1], args[2])
			if err != nil {
				return err
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				podID, err := client.Pod(ctx, args[0])
				if err != nil {
					return err
				}
				if pull {
					if err := a.ensureImage(ctx, client, container.GetImage()); err != nil {
						return err
					}
				}
				id, err := client.CreateContainer(ctx, podID, container, pod)
				if err == nil {
					fmt.Fprintln(a.Stdout, id)
				}
				return err
			})
		},
	}
	c.Flags().BoolVar(&pull, "with-pull", false, "pull the image first if it is missing")
	return c
}

func readConfigs(containerFile, podFile string) (*runtimeapi.ContainerConfig, *runtimeapi.PodSandboxConfig, error) {
	container, pod := &runtimeapi.ContainerConfig{}, &runtimeapi.PodSandboxConfig{}
	if err := readMessage(containerFile, container); err != nil {
		return nil, nil, err
	}
	return container, pod, readMessage(podFile, pod)
}

// ensureImage pulls the image if it is missing.
func (a *App) ensureImage(ctx context.Context, client *Client, spec *runtimeapi.ImageSpec) error {
	image, err := client.imageStatus(ctx, spec)
	if err != nil || image != nil {
		return err
	}
	_, err = a.pull(ctx, client, spec, nil)
	return err
}

// defaultLogDir is where a kubelet keeps the logs of pods.
const defaultLogDir = "/var/log/pods"

// runOptions configures the pod of `run IMAGE`.
type runOptions struct {
	name, handler string
	hostNetwork   bool
	userns        bool
	command       bool
	entrypoint    string
	workdir, user string
	privileged    bool
	tty, stdin    bool
	detach        bool
	env, publish  []string
	volumes       []string
	annotations   []string
	logDir        string
}

// attached reports whether the command stays in the foreground.
func (o runOptions) attached(m manifestOptions) bool {
	return !o.detach && (o.stdin || o.tty || m.wait || m.remove)
}

func (a *App) runCommand() *cobra.Command {
	var o runOptions
	var m manifestOptions
	c := &cobra.Command{
		Use:   "run {IMAGE [[--] ARGUMENT...] | CONTAINER-FILE POD-FILE | -f MANIFEST}",
		Short: "Run a container in its own pod, from an image or from two files, or the pods of a Kubernetes manifest",
		Long: `Run pulls the image if it is missing, starts a pod, and creates and starts one container in it. If a step
fails, it removes the pod again. It prints the container's ID.

With --rm, --wait, -i or -t it stays in the foreground: it passes the container's output on, with -i also its own input, and
exits with the container's exit code. An interrupt stops the container within 10 seconds; another one kills it. With -it the
keys Ctrl-P Ctrl-Q leave the container alone. -d returns at once in any case.

With -f it runs the Pods of a file of Kubernetes manifests ("-": standard input) with their init containers, sidecars and
volumes, and prints the pods' IDs. ConfigMaps and Secrets that the Pods use are in the same file. A field that asks for what
only a cluster has is refused by its path before anything is made; a warning names the fields that have no effect, such as
those that kubectl adds. If a step fails, run removes all of these pods. Nothing restarts their containers. Remove the pods
and their volumes with "tripod rmp".

  tripod run -p 8080:80 docker.io/library/nginx:1
  tripod run --rm -it docker.io/library/busybox:1
  tripod run --name hello docker.io/library/busybox:1 -- sh -c 'echo hello; sleep 60'
  tripod run -r vm -d -i --annotation tripod.dev/vm.vcpu-count=2 registry.example/disk:1
  tripod run container.json pod.json
  tripod run -f pod.yaml
  kubectl run web --image=nginx --dry-run=client -o yaml | tripod run -f -
  tripod run --rm -f - <job.yaml`,
		Args: cobra.ArbitraryArgs, ValidArgsFunction: a.completeRun,
		RunE: func(c *cobra.Command, args []string) error {
			args, err := argumentsOfRun(c, args)
			if err != nil {
				return err
			}
			if m.file != "" {
				m.logDir = o.logDir
				return a.runFile(c, args, m)
			}
			container, pod, err := o.configs(args)
			if err != nil {
				return err
			}
			attached := o.attached(m)
			if attached {
				container.StdinOnce = container.GetStdin()
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				podID, id, err := a.run(ctx, client, container, pod, o.handler)
				if err != nil {
					return err
				}
				if !attached {
					return a.printRun(ctx, client, id)
				}
				err = a.foreground(ctx, client, id, container)
				if errors.Is(err, errLeft) {
					return nil
				}
				if m.remove {
					// The exit code is the container's in any case.
					if undo := removeRun(ctx, client, podID); undo != nil {
						fmt.Fprintf(a.Stderr, "tripod run: %s\n", Explain(undo))
					} else if !areConfigFiles(args) { // the directory is this pod's alone
						_ = os.RemoveAll(pod.GetLogDirectory())
					}
				}
				return err
			})
		},
	}
	f := c.Flags()
	f.StringVar(&o.name, "name", "", "name of pod and container; default: from the image")
	f.StringVarP(&o.handler, "runtime", "r", "", "RuntimeClass handler; empty: the node's default")
	a.completeFlag(c, "runtime", handlerWords)
	f.BoolVar(&o.hostNetwork, "host-network", false, "use the node's network")
	f.BoolVar(&o.userns, "userns", false, "give the pod a user namespace: its root is no user of the node")
	f.BoolVar(&o.command, "command", false, "the words after -- replace the image's entrypoint, not only its arguments")
	f.StringVar(&o.entrypoint, "entrypoint", "", "program in place of the image's entrypoint; the words after the image are its arguments")
	f.StringVarP(&o.workdir, "workdir", "w", "", "working directory")
	f.StringVarP(&o.user, "user", "u", "", "user of the container: UID or NAME, with :GID if it is not the user's own group")
	f.BoolVar(&o.privileged, "privileged", false, "give the container all capabilities and the node's devices")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the container a terminal")
	f.BoolVarP(&o.stdin, "interactive", "i", false, "give the container a standard input")
	f.BoolVarP(&o.detach, "detach", "d", false, "do not stay in the foreground")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment NAME=VALUE")
	f.StringArrayVar(&o.annotations, "annotation", nil, "annotation KEY=VALUE of the pod")
	f.StringVar(&o.logDir, "log-dir", defaultLogDir,
		"parent of the pod's log directory, which stays when the pod is removed, except with --rm IMAGE")
	f.StringArrayVarP(&o.publish, "publish", "p", nil, "host port [ADDRESS:]HOST:CONTAINER[/udp]")
	f.StringArrayVarP(&o.volumes, "volume", "v", nil, "directory or file of the node: /HOST-PATH:/CONTAINER-PATH[:ro]")
	a.manifestFlags(c, &m)
	c.MarkFlagsMutuallyExclusive("command", "entrypoint")
	f.SetInterspersed(false) // what follows the image is the container's
	return c
}

// argumentsOfRun returns the image with the container's arguments, or the two files. Flags are read before the first argument of
// the container, also after the image.
func argumentsOfRun(c *cobra.Command, args []string) ([]string, error) {
	first := 1
	if areConfigFiles(args) {
		first = 2
	}
	if len(args) <= first {
		return args, nil
	}
	if err := c.Flags().Parse(args[first:]); err != nil {
		return nil, fmt.Errorf("%w; put -- before the container's own flags", err)
	}
	return append(args[:first:first], c.Flags().Args()...), c.ValidateFlagGroups()
}

// configs makes the messages for the container and the pod from the arguments.
func (o runOptions) configs(args []string) (*runtimeapi.ContainerConfig, *runtimeapi.PodSandboxConfig, error) {
	switch {
	case len(args) == 0:
		return nil, nil, fmt.Errorf("needs an image and its arguments, or two files that end in .json or .yaml")
	case len(args) == 2 && areConfigFiles(args):
		return readConfigs(args[0], args[1])
	}
	mounts, err := parseVolumes(o.volumes)
	if err != nil {
		return nil, nil, err
	}
	ports, err := parsePorts(o.publish)
	if err != nil {
		return nil, nil, err
	}
	envs, err := parseEnv(o.env)
	if err != nil {
		return nil, nil, err
	}
	annotations, err := parseAnnotations(o.annotations)
	if err != nil {
		return nil, nil, err
	}
	name := cmp.Or(o.name, nameOf(args[0]))
	uid := randomUID()
	network := runtimeapi.NamespaceMode_POD
	if o.hostNetwork {
		network = runtimeapi.NamespaceMode_NODE
	}
	spaces := &runtimeapi.NamespaceOption{Network: network, Pid: runtimeapi.NamespaceMode_CONTAINER}
	if o.userns {
		spaces.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD}
	}
	pod := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: uid},
		LogDirectory: path.Join(o.logDir, "default_"+name+"_"+uid),
		PortMappings: ports,
		Annotations:  annotations,
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: spaces,
			Privileged: o.privileged}},
	}
	if !o.hostNetwork {
		pod.Hostname = name
	}
	security := &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: spaces, Privileged: o.privileged}
	if err := setUser(security, o.user); err != nil {
		return nil, nil, err
	}
	container := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, WorkingDir: o.workdir,
		Image: &runtimeapi.ImageSpec{Image: args[0], UserSpecifiedImage: args[0]},
		Args:  args[1:], Envs: envs, Mounts: mounts, Tty: o.tty, Stdin: o.stdin,
		LogPath: name + "/0.log",
		Linux:   &runtimeapi.LinuxContainerConfig{SecurityContext: security},
	}
	switch {
	case o.command:
		container.Command, container.Args = container.Args, nil
	case o.entrypoint != "":
		container.Command = []string{o.entrypoint}
	}
	return container, pod, nil
}

// run makes a pod and a container and removes both if a step fails.
func (a *App) run(ctx context.Context, client *Client, container *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig,
	handler string) (podID, id string, err error) {
	image := &runtimeapi.ImageSpec{Image: container.GetImage().GetImage(), RuntimeHandler: handler}
	if err := a.ensureImage(ctx, client, image); err != nil {
		return "", "", err
	}
	podID, err = client.RunPodSandbox(ctx, pod, handler)
	if err != nil {
		return "", "", err
	}
	if id, err = client.CreateContainer(ctx, podID, container, pod); err == nil {
		err = client.StartContainer(ctx, id)
	}
	if err == nil {
		return podID, id, nil
	}
	if undo := removeRun(ctx, client, podID); undo != nil {
		return "", "", fmt.Errorf("%w; and %s", err, Explain(undo))
	}
	return "", "", err
}

// removeRun removes the pod of run, even if ctx has ended.
func removeRun(ctx context.Context, client *Client, podID string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := removePod(ctx, client, podID, true, true); err != nil {
		return fmt.Errorf("pod %s could not be removed: %w", shortID(podID), err)
	}
	return nil
}

// printRun prints the container's ID, or the container in another format.
func (a *App) printRun(ctx context.Context, client *Client, id string) error {
	if a.asID() {
		_, err := fmt.Fprintln(a.Stdout, id)
		return err
	}
	found, err := client.ListContainers(ctx, &runtimeapi.ContainerFilter{Id: id})
	if err != nil {
		return err
	}
	return a.Print(&runtimeapi.ListContainersResponse{Containers: found},
		func(wide bool) error { return a.containerTable(ctx, client, found, wide) })
}

// areConfigFiles reports whether the arguments begin with two files of messages.
func areConfigFiles(args []string) bool {
	isFile := func(arg string) bool { return slices.Contains([]string{".json", ".yaml", ".yml"}, path.Ext(arg)) }
	return len(args) >= 2 && isFile(args[0]) && isFile(args[1])
}

// nameOf converts the last part of an image reference to a DNS label.
func nameOf(ref string) string {
	ref, _, _ = strings.Cut(ref, "@")
	ref, _ = splitTag(ref)
	label := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(path.Base(ref)))
	if label = strings.Trim(label, "-"); label == "" {
		return "pod"
	}
	return label[:min(len(label), 63)]
}

func randomUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // documented never to fail
	return hex.EncodeToString(b[:])
}

// setUser sets the user that --user names.
func setUser(sc *runtimeapi.LinuxContainerSecurityContext, text string) error {
	user, group, both := strings.Cut(text, ":")
	if uid, err := strconv.ParseUint(user, 10, 31); err == nil {
		sc.RunAsUser = &runtimeapi.Int64Value{Value: int64(uid)}
	} else {
		sc.RunAsUsername = user
	}
	if !both {
		return nil
	}
	gid, err := strconv.ParseUint(group, 10, 31)
	if err != nil || user == "" {
		return fmt.Errorf("--user %q is neither UID[:GID] nor NAME[:GID]", text)
	}
	sc.RunAsGroup = &runtimeapi.Int64Value{Value: int64(gid)}
	return nil
}

func parseEnv(list []string) ([]*runtimeapi.KeyValue, error) {
	var envs []*runtimeapi.KeyValue
	for _, e := range list {
		key, value, ok := strings.Cut(e, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("--env %q is not NAME=VALUE", e)
		}
		envs = append(envs, &runtimeapi.KeyValue{Key: key, Value: []byte(value)})
	}
	return envs, nil
}

func parseAnnotations(list []string) (map[string]string, error) {
	all := map[string]string{}
	for _, a := range list {
		key, value, ok := strings.Cut(a, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("--annotation %q is not KEY=VALUE", a)
		}
		all[key] = value
	}
	return all, nil
}

func parseVolumes(list []string) ([]*runtimeapi.Mount, error) {
	var mounts []*runtimeapi.Mount
	for _, v := range list {
		parts := strings.Split(v, ":")
		readOnly := len(parts) == 3 && parts[2] == "ro"
		if len(parts) == 3 && (readOnly || parts[2] == "rw") {
			parts = parts[:2]
		}
		if len(parts) != 2 || !path.IsAbs(parts[0]) || !path.IsAbs(parts[1]) {
			return nil, fmt.Errorf("--volume %q is not /HOST-PATH:/CONTAINER-PATH[:ro]; volumes with a name are for manifests (-f)", v)
		}
		mounts = append(mounts, &runtimeapi.Mount{HostPath: parts[0], ContainerPath: parts[1], Readonly: readOnly})
	}
	return mounts, nil
}

func parsePorts(list []string) ([]*runtimeapi.PortMapping, error) {
	var ports []*runtimeapi.PortMapping
	for _, p := range list {
		text, protocol, _ := strings.Cut(p, "/")
		m := &runtimeapi.PortMapping{}
		switch protocol {
		case "", "tcp":
		case "udp":
			m.Protocol = runtimeapi.Protocol_UDP
		case "sctp":
			m.Protocol = runtimeapi.Protocol_SCTP
		default:
			return nil, fmt.Errorf("--publish %q: protocol %q is not tcp, udp or sctp", p, protocol)
		}
		i := strings.LastIndexByte(text, ':')
		if i < 0 {
			return nil, fmt.Errorf("--publish %q is not [ADDRESS:]HOST:CONTAINER", p)
		}
		host, inside := text[:i], text[i+1:]
		if j := strings.LastIndexByte(host, ':'); j >= 0 {
			m.HostIp, host = strings.Trim(host[:j], "[]"), host[j+1:]
		}
		for _, n := range []struct {
			text string
			into *int32
		}{{host, &m.HostPort}, {inside, &m.ContainerPort}} {
			v, err := strconv.ParseUint(n.text, 10, 16)
			if err != nil || v == 0 {
				return nil, fmt.Errorf("--publish %q: %q is not a port", p, n.text)
			}
			*n.into = int32(v)
		}
		ports = append(ports, m)
	}
	return ports, nil
}
