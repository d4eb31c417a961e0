package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
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
		Use: "create POD CONTAINER-FILE POD-FILE", Short: "Create a container in a pod from a JSON or YAML ContainerConfig", Args: cobra.ExactArgs(3),
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

// runOptions configures the pod of `run IMAGE`.
type runOptions struct {
	name, handler string
	hostNetwork   bool
	userns        bool
	command       bool
	tty, stdin    bool
	env, publish  []string
	annotations   []string
	logDir        string
}

func (a *App) runCommand() *cobra.Command {
	var o runOptions
	var m manifestOptions
	c := &cobra.Command{
		Use:   "run {IMAGE [-- ARGUMENT...] | CONTAINER-FILE POD-FILE | -f MANIFEST}",
		Short: "Run a container in its own pod, from an image or from two files, or the pods of a Kubernetes manifest",
		Long: `Run pulls the image if it is missing, starts a pod, and creates and starts one container in it. If a step
fails, it removes the pod again. It prints the container's ID.

With -f it runs the Pods of a file of Kubernetes manifests ("-": standard input) with their init containers, sidecars and
volumes, and prints the pods' IDs. ConfigMaps and Secrets that the Pods use are in the same file. A field that has no effect
without a cluster is refused by its path before anything is made. If a step fails, run removes all of these pods. Nothing
restarts their containers. Remove the pods and their volumes with "tripod rmp".

  tripod run docker.io/library/nginx:1 -p 8080:80
  tripod run --name hello docker.io/library/busybox:1 -- sh -c 'echo hello; sleep 60'
  tripod run -r vm -i --annotation tripod.dev/vm.vcpu-count=2 registry.example/disk:1
  tripod run container.json pod.json
  tripod run -f pod.yaml
  tripod run --rm -f - <job.yaml`,
		Args: cobra.ArbitraryArgs, ValidArgsFunction: a.completeRun,
		RunE: func(c *cobra.Command, args []string) error {
			if m.file != "" {
				m.logDir = o.logDir
				return a.runFile(c, args, m)
			}
			if m.wait || m.remove {
				return fmt.Errorf("--wait and --rm need -f: %w", errdefs.ErrInvalidArgument)
			}
			container, pod, err := o.configs(args, c.ArgsLenAtDash())
			if err != nil {
				return err
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := a.run(ctx, client, container, pod, o.handler)
				if err != nil {
					return err
				}
				return a.printRun(ctx, client, id)
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
	f.BoolVarP(&o.tty, "tty", "t", false, "give the container a terminal")
	f.BoolVarP(&o.stdin, "interactive", "i", false, "keep the container's standard input for attach")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment NAME=VALUE")
	f.StringArrayVar(&o.annotations, "annotation", nil, "annotation KEY=VALUE of the pod")
	f.StringVar(&o.logDir, "log-dir", "/var/log/pods", "parent of the pod's log directory, which stays when the pod is removed")
	f.StringArrayVarP(&o.publish, "publish", "p", nil, "host port [ADDRESS:]HOST:CONTAINER[/udp]")
	a.manifestFlags(c, &m)
	return c
}

// configs makes the messages for the container and the pod from the arguments. The parameter dash is the number of
// arguments before "--", or -1 if there is no "--".
func (o runOptions) configs(args []string, dash int) (*runtimeapi.ContainerConfig, *runtimeapi.PodSandboxConfig, error) {
	if dash < 0 && len(args) == 2 && isConfigFile(args[0]) && isConfigFile(args[1]) {
		return readConfigs(args[0], args[1])
	}
	if (dash < 0 && len(args) != 1) || dash > 1 || dash == 0 {
		return nil, nil, fmt.Errorf("needs an image and, after --, its arguments; or two files that end in .json or .yaml")
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
		Linux:        &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: spaces}},
	}
	if !o.hostNetwork {
		pod.Hostname = name
	}
	container := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: args[0], UserSpecifiedImage: args[0]},
		Args:     args[1:], Envs: envs, Tty: o.tty, Stdin: o.stdin,
		LogPath: name + "/0.log",
		Linux:   &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: spaces}},
	}
	if o.command {
		container.Command, container.Args = container.Args, nil
	}
	return container, pod, nil
}

// run makes a pod and a container and removes both if a step fails.
func (a *App) run(ctx context.Context, client *Client, container *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig, handler string) (id string, err error) {
	image := &runtimeapi.ImageSpec{Image: container.GetImage().GetImage(), RuntimeHandler: handler}
	if err := a.ensureImage(ctx, client, image); err != nil {
		return "", err
	}
	podID, err := client.RunPodSandbox(ctx, pod, handler)
	if err != nil {
		return "", err
	}
	if id, err = client.CreateContainer(ctx, podID, container, pod); err == nil {
		err = client.StartContainer(ctx, id)
	}
	if err == nil {
		return id, nil
	}
	// ctx may have ended, so the clean-up has its own timeout.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	if undo := removePod(ctx, client, podID, true, true); undo != nil {
		return "", fmt.Errorf("%w; and pod %s could not be removed: %s", err, shortID(podID), Explain(undo))
	}
	return "", err
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
	return a.Print(&runtimeapi.ListContainersResponse{Containers: found}, func(wide bool) error { return a.containerTable(ctx, client, found, wide) })
}

func isConfigFile(arg string) bool {
	switch path.Ext(arg) {
	case ".json", ".yaml", ".yml":
		return true
	}
	return false
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
