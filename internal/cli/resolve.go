package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// named is one candidate for an argument.
type named struct{ id, name string }

// pick returns the ID of the candidate that arg refers to by ID, name or ID prefix, in this order. The first parameter
// is the word for a candidate in errors.
func pick(kind, arg string, all []named) (string, error) {
	if arg == "" {
		return "", fmt.Errorf("the %s ID is empty", kind)
	}
	var byPrefix, byName []string
	for _, n := range all {
		if n.id == arg {
			return n.id, nil
		}
		if strings.HasPrefix(n.id, arg) {
			byPrefix = append(byPrefix, n.id)
		}
		if n.name == arg {
			byName = append(byName, n.id)
		}
	}
	for _, found := range [][]string{byName, byPrefix} {
		if len(found) == 1 {
			return found[0], nil
		}
		if len(found) > 1 {
			slices.Sort(found)
			return "", fmt.Errorf("%q matches %d %[3]ss: %[4]s", arg, len(found), kind, strings.Join(shortIDs(found), ", "))
		}
	}
	return "", fmt.Errorf("no %s has the ID or the name %q%w", kind, arg, errNoMatch)
}

// errNoMatch marks the error for an argument that refers to nothing. It has no text of its own.
var errNoMatch = errors.New("")

// Pod returns the ID of the pod that arg refers to.
func (c *Client) Pod(ctx context.Context, arg string) (string, error) {
	pods, err := c.ListPodSandbox(ctx, nil)
	if err != nil {
		return "", err
	}
	all := make([]named, len(pods))
	for i, p := range pods {
		all[i] = named{p.GetId(), p.GetMetadata().GetName()}
	}
	id, err := pick("pod", arg, all)
	if err == nil || arg == "" {
		return id, err
	}
	if resp, statusErr := c.PodSandboxStatus(ctx, arg, false); statusErr == nil { // arg can be the ID of a unit pod's container
		return resp.GetStatus().GetId(), nil
	}
	return "", err
}

// Container returns the ID of the container that arg refers to.
func (c *Client) Container(ctx context.Context, arg string) (string, error) {
	containers, err := c.ListContainers(ctx, nil)
	if err != nil {
		return "", err
	}
	// A restarted container leaves stopped attempts under the same name; prefer the latest.
	slices.SortStableFunc(containers, func(x, y *runtimeapi.Container) int {
		return int(y.GetMetadata().GetAttempt()) - int(x.GetMetadata().GetAttempt())
	})
	seen := map[string]bool{}
	all := make([]named, len(containers))
	for i, k := range containers {
		if k.GetPodSandboxId() == arg {
			if resp, err := c.ContainerStatus(ctx, arg, false); err == nil { // a unit pod's ID means its newest container
				return resp.GetStatus().GetId(), nil
			}
		}
		all[i] = named{id: k.GetId()}
		if of := k.GetPodSandboxId() + "/" + k.GetMetadata().GetName(); !seen[of] {
			seen[of] = true
			all[i].name = k.GetMetadata().GetName()
		}
	}
	return pick("container", arg, all)
}

// ContainerIn is like Container, and takes a pod as well, as kubectl does: it returns the pod's container with the given name, or
// without a name its only one.
func (c *Client) ContainerIn(ctx context.Context, arg, name string) (string, error) {
	if name == "" {
		if id, err := c.Container(ctx, arg); !errors.Is(err, errNoMatch) {
			return id, err
		}
	}
	pod, podErr := c.Pod(ctx, arg)
	if errors.Is(podErr, errNoMatch) && name == "" {
		return "", fmt.Errorf("no container and no pod has the ID or the name %q", arg)
	}
	if podErr != nil {
		return "", podErr
	}
	containers, err := c.ListContainers(ctx, &runtimeapi.ContainerFilter{PodSandboxId: pod})
	if err != nil {
		return "", err
	}
	return choose(arg, name, containers)
}

// choose returns the newest attempt of a pod's container.
func choose(pod, name string, containers []*runtimeapi.Container) (string, error) {
	newest := map[string]*runtimeapi.Container{}
	for _, k := range containers {
		of := k.GetMetadata().GetName()
		if old := newest[of]; old == nil || old.GetMetadata().GetAttempt() < k.GetMetadata().GetAttempt() {
			newest[of] = k
		}
	}
	names := slices.Sorted(maps.Keys(newest))
	switch {
	case newest[name] != nil:
		return newest[name].GetId(), nil
	case len(names) == 0:
		return "", fmt.Errorf("pod %s has no container", pod)
	case name != "":
		return "", fmt.Errorf("pod %s has no container %q; it has %s", pod, name, strings.Join(names, ", "))
	case len(names) == 1:
		return newest[names[0]].GetId(), nil
	}
	return "", fmt.Errorf("pod %s has the containers %s: choose one with -c", pod, strings.Join(names, ", "))
}

// containerFlag adds the flag that chooses a container of a pod.
func containerFlag(c *cobra.Command, name *string) {
	c.Flags().StringVarP(name, "container", "c", "", "the container, if the argument is a pod with several")
}

// each resolves every argument to an ID and passes the ID to the function do. It continues after errors, and prints the
// IDs of the successful calls.
func (a *App) each(args []string, resolve func(string) (string, error), do func(id string) error) error {
	failed := 0
	for _, arg := range args {
		id, err := resolve(arg)
		if err == nil {
			err = do(id)
		}
		if err != nil {
			failed++
			fmt.Fprintf(a.Stderr, "%s: %s\n", arg, Explain(err))
			continue
		}
		fmt.Fprintln(a.Stdout, id)
	}
	if failed > 0 {
		return &ExitError{Code: 1, Err: fmt.Errorf("%d of %d failed", failed, len(args))}
	}
	return nil
}
