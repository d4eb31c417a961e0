package cli

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/play"
)

func (a *App) podsCommand() *cobra.Command {
	var name, namespace, state string
	var labels map[string]string
	c := &cobra.Command{
		Use: "pods", Short: "List pods", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				filter := &runtimeapi.PodSandboxFilter{LabelSelector: labels}
				switch strings.ToLower(state) {
				case "":
				case "ready":
					filter.State = &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY}
				case "notready":
					filter.State = &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY}
				default:
					return fmt.Errorf("--state %q is neither ready nor notready", state)
				}
				return a.listPods(ctx, client, filter, name, namespace)
			})
		},
	}
	c.Flags().StringVar(&name, "name", "", "only pods whose name contains this")
	c.Flags().StringVar(&namespace, "namespace", "", "only pods of this namespace")
	c.Flags().StringVarP(&state, "state", "s", "", "only ready or notready pods")
	c.Flags().StringToStringVarP(&labels, "label", "l", nil, "only pods with these labels, key=value")
	a.completeFlag(c, "namespace", namespaceWords)
	a.formatFlags(c, "print only IDs")
	return c
}

func (a *App) listPods(ctx context.Context, client *Client, filter *runtimeapi.PodSandboxFilter, name, namespace string) error {
	pods, err := client.ListPodSandbox(ctx, filter)
	if err != nil {
		return err
	}
	list := &runtimeapi.ListPodSandboxResponse{}
	for _, p := range pods {
		if strings.Contains(p.GetMetadata().GetName(), name) && (namespace == "" || p.GetMetadata().GetNamespace() == namespace) {
			list.Items = append(list.Items, p)
		}
	}
	return a.printPods(ctx, client, list)
}

func (a *App) printPods(ctx context.Context, client *Client, list *runtimeapi.ListPodSandboxResponse) error {
	if a.quiet {
		for _, p := range list.Items {
			fmt.Fprintln(a.Stdout, p.GetId())
		}
		return nil
	}
	return a.Print(list, func(wide bool) error {
		header := []string{"POD ID", "CREATED", "STATE", "NAME", "NAMESPACE", "ATTEMPT", "RUNTIME"}
		if wide {
			header = append(header, "IP", "UID", "LABELS")
		}
		t := newTable(a.Stdout, header...)
		for _, p := range list.Items {
			t.row(podRow(ctx, client, p, wide)...)
		}
		return t.flush()
	})
}

func podRow(ctx context.Context, client *Client, p *runtimeapi.PodSandbox, wide bool) []string {
	ready := p.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY
	row := []string{shortID(p.GetId()), age(p.GetCreatedAt()), podStateWord(ready), p.GetMetadata().GetName(),
		p.GetMetadata().GetNamespace(), strconv.Itoa(int(p.GetMetadata().GetAttempt())), cmp.Or(p.GetRuntimeHandler(), "(default)")}
	if !wide {
		return row
	}
	ips := "-"
	if status, err := client.PodSandboxStatus(ctx, p.GetId(), false); err == nil && status.GetStatus().GetNetwork().GetIp() != "" {
		ips = status.GetStatus().GetNetwork().GetIp()
		for _, more := range status.GetStatus().GetNetwork().GetAdditionalIps() {
			ips += "," + more.GetIp()
		}
	}
	return append(row, ips, p.GetMetadata().GetUid(), pairs(p.GetLabels()))
}

func podStateWord(ready bool) string {
	if ready {
		return "Ready"
	}
	return "NotReady"
}

func (a *App) stoppCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stopp POD...", Short: "Stop pods and the containers in them", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				return a.each(args,
					func(arg string) (string, error) { return client.Pod(ctx, arg) },
					func(id string) error { return client.StopPodSandbox(ctx, id) })
			})
		},
	}
}

func (a *App) rmpCommand() *cobra.Command {
	var force, all bool
	var volumeDir string
	c := &cobra.Command{
		Use: "rmp [-f] POD...", Short: "Remove stopped pods (-f: running ones too)", ValidArgsFunction: a.completion(podWords),
		Args: needArgsOr(&all),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				pods, err := client.ListPodSandbox(ctx, nil)
				if err != nil {
					return err
				}
				ready, uids := map[string]bool{}, map[string]string{}
				for _, p := range pods {
					ready[p.GetId()] = p.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY
					uids[p.GetId()] = p.GetMetadata().GetUid()
					if all {
						args = append(args, p.GetId())
					}
				}
				return a.each(args,
					func(arg string) (string, error) { return client.Pod(ctx, arg) },
					func(id string) error {
						if err := removePod(ctx, client, id, ready[id], force); err != nil {
							return err
						}
						return play.RemoveVolumes(volumeDir, uids[id])
					})
			})
		},
	}
	c.Flags().StringVar(&volumeDir, "volume-dir", DefaultVolumeDir, "parent of the volumes of `run -f`, which are removed with their pods")
	c.Flags().BoolVarP(&force, "force", "f", false, "stop running pods first")
	c.Flags().BoolVarP(&all, "all", "a", false, "all pods")
	return c
}

// removePod stops and removes a pod. It refuses a running pod unless force is set; the CRI's RemovePodSandbox would
// remove such a pod without asking.
func removePod(ctx context.Context, client *Client, id string, ready, force bool) error {
	if ready && !force {
		return fmt.Errorf("the pod is ready; stop it first (`tripod stopp`) or remove it with -f")
	}
	if err := client.StopPodSandbox(ctx, id); err != nil {
		return err
	}
	return client.RemovePodSandbox(ctx, id)
}

// needArgsOr requires at least one argument unless all is set.
func needArgsOr(all *bool) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) == 0 && !*all {
			return fmt.Errorf("needs at least one ID, or --all")
		}
		if len(args) > 0 && *all {
			return fmt.Errorf("use either --all or IDs")
		}
		return nil
	}
}
