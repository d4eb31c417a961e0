package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

type psOptions struct {
	all                     bool
	name, pod, state, image string
	labels                  map[string]string
}

func (a *App) psCommand() *cobra.Command {
	var o psOptions
	c := &cobra.Command{
		Use: "ps", Short: "List containers", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error { return a.listContainers(ctx, client, o) })
		},
	}
	c.Flags().BoolVarP(&o.all, "all", "a", false, "containers in every state, not only running ones")
	c.Flags().StringVar(&o.name, "name", "", "only containers whose name contains this")
	c.Flags().StringVarP(&o.pod, "pod", "p", "", "only containers of this pod")
	c.Flags().StringVarP(&o.state, "state", "s", "", "only containers that are created, running, exited or unknown")
	c.Flags().StringVar(&o.image, "image", "", "only containers whose image contains this")
	c.Flags().StringToStringVarP(&o.labels, "label", "l", nil, "only containers with these labels, key=value")
	a.completeFlag(c, "pod", podWords)
	a.completeFlag(c, "image", imageWords)
	a.formatFlags(c, "print only IDs")
	return c
}

func (o psOptions) filter(ctx context.Context, client *Client) (*runtimeapi.ContainerFilter, error) {
	filter := &runtimeapi.ContainerFilter{LabelSelector: o.labels}
	if o.pod != "" {
		id, err := client.Pod(ctx, o.pod)
		if err != nil {
			return nil, err
		}
		filter.PodSandboxId = id
	}
	state := o.state
	if state == "" && !o.all {
		state = "running"
	}
	if state != "" {
		v, ok := runtimeapi.ContainerState_value["CONTAINER_"+strings.ToUpper(state)]
		if !ok {
			return nil, fmt.Errorf("--state %q is not created, running, exited or unknown", state)
		}
		filter.State = &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState(v)}
	}
	return filter, nil
}

func (a *App) listContainers(ctx context.Context, client *Client, o psOptions) error {
	filter, err := o.filter(ctx, client)
	if err != nil {
		return err
	}
	list := &runtimeapi.ListContainersResponse{}
	containers, err := client.ListContainers(ctx, filter)
	if err != nil {
		return err
	}
	for _, k := range containers {
		if strings.Contains(k.GetMetadata().GetName(), o.name) && strings.Contains(imageOf(k), o.image) {
			list.Containers = append(list.Containers, k)
		}
	}
	if a.quiet {
		for _, k := range list.Containers {
			fmt.Fprintln(a.Stdout, k.GetId())
		}
		return nil
	}
	return a.Print(list, func(wide bool) error { return a.containerTable(ctx, client, list.Containers, wide) })
}

func (a *App) containerTable(ctx context.Context, client *Client, containers []*runtimeapi.Container, wide bool) error {
	pods, err := client.ListPodSandbox(ctx, nil)
	if err != nil {
		return err
	}
	podName := map[string]string{}
	for _, p := range pods {
		podName[p.GetId()] = p.GetMetadata().GetName()
	}
	header := []string{"CONTAINER", "IMAGE", "CREATED", "STATE", "NAME", "ATTEMPT", "POD ID", "POD"}
	if wide {
		header = append(header, "EXIT", "REASON", "LABELS")
	}
	t := newTable(a.Stdout, header...)
	for _, k := range containers {
		row := []string{shortID(k.GetId()), shortID(imageOf(k)), age(k.GetCreatedAt()), stateWord(k.GetState()), k.GetMetadata().GetName(),
			strconv.Itoa(int(k.GetMetadata().GetAttempt())), shortID(k.GetPodSandboxId()), podName[k.GetPodSandboxId()]}
		if wide {
			exit, reason := exitOf(ctx, client, k)
			row = append(row, exit, reason, pairs(k.GetLabels()))
		}
		t.row(row...)
	}
	return t.flush()
}

func exitOf(ctx context.Context, client *Client, k *runtimeapi.Container) (code, reason string) {
	if k.GetState() != runtimeapi.ContainerState_CONTAINER_EXITED {
		return "-", "-"
	}
	resp, err := client.ContainerStatus(ctx, k.GetId(), false)
	if err != nil {
		return "?", Explain(err)
	}
	return strconv.Itoa(int(resp.GetStatus().GetExitCode())), resp.GetStatus().GetReason()
}

func imageOf(k *runtimeapi.Container) string {
	return cmp.Or(k.GetImage().GetUserSpecifiedImage(), k.GetImage().GetImage())
}

// stateWord converts CONTAINER_RUNNING to Running.
func stateWord(s runtimeapi.ContainerState) string {
	word := strings.ToLower(strings.TrimPrefix(s.String(), "CONTAINER_"))
	return strings.ToUpper(word[:1]) + word[1:]
}

func (a *App) startCommand() *cobra.Command {
	return &cobra.Command{
		Use: "start CONTAINER...", Short: "Start created containers", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completion(containerWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				return a.each(args,
					func(arg string) (string, error) { return client.Container(ctx, arg) },
					func(id string) error { return client.StartContainer(ctx, id) })
			})
		},
	}
}

func (a *App) stopCommand() *cobra.Command {
	var grace int64
	c := &cobra.Command{
		Use: "stop CONTAINER...", Short: "Stop running containers", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completion(containerWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				return a.each(args,
					func(arg string) (string, error) { return client.Container(ctx, arg) },
					func(id string) error { return client.StopContainer(ctx, id, grace) })
			})
		},
	}
	c.Flags().Int64VarP(&grace, "grace", "t", stopGrace, "seconds before the container is killed; 0: immediately")
	return c
}

func (a *App) rmCommand() *cobra.Command {
	var force, all bool
	c := &cobra.Command{
		Use: "rm [-f] CONTAINER...", Short: "Remove stopped containers (-f: running ones too)", ValidArgsFunction: a.completion(containerWords),
		Args: needArgsOr(&all),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				containers, err := client.ListContainers(ctx, nil)
				if err != nil {
					return err
				}
				var running []string
				for _, k := range containers {
					if all {
						args = append(args, k.GetId())
					}
					if k.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
						running = append(running, k.GetId())
					}
				}
				return a.each(args,
					func(arg string) (string, error) { return client.Container(ctx, arg) },
					func(id string) error {
						if slices.Contains(running, id) && !force {
							return fmt.Errorf("the container is running; stop it first (`tripod stop`) or remove it with -f")
						}
						return client.RemoveContainer(ctx, id)
					})
			})
		},
	}
	c.Flags().BoolVarP(&force, "force", "f", false, "kill and remove running containers too")
	c.Flags().BoolVarP(&all, "all", "a", false, "all containers")
	return c
}
