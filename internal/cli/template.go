package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
)

// templatePoll is the time between two looks at a template that is being made.
const templatePoll = time.Second

// CreateTemplateCommand returns the command that makes the templates of machines.
func (a *App) CreateTemplateCommand() *cobra.Command {
	m := manifestOptions{wait: true, volumeDir: DefaultVolumeDir, initTimeout: 10 * time.Minute}
	limit := 30 * time.Minute
	c := &cobra.Command{
		Use: "create -f FILE", Short: "Make the templates for the Pods of a file",
		Long: `Make the templates from which the machines of Pods like those in a file of Kubernetes manifests continue: the same namespace, runtime class,
CPUs, memory and, for the handler vm, image and annotations. The command runs the Pods as "tripod run -f" does, waits until the node has their templates, and removes
the Pods.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			pods, err := a.planManifests(m)
			if err != nil {
				return err
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				waiting, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not ready after %s (--wait): %w", limit, errdefs.ErrUnavailable))
				defer cancel()
				err := a.startAll(waiting, client, m, pods)
				for _, p := range pods {
					if err == nil {
						err = a.awaitTemplate(waiting, client, p)
					}
				}
				return errors.Join(err, undo(ctx, client, m, pods))
			})
		},
	}
	f := c.Flags()
	f.StringVarP(&m.file, "file", "f", "", "file of Kubernetes manifests with the Pods; -: standard input")
	f.StringVar(&m.volumeDir, "volume-dir", m.volumeDir, "parent of the directories with the pods' volumes")
	f.StringVar(&m.logDir, "log-dir", defaultLogDir, "parent of the pods' log directories, which stay")
	f.DurationVar(&limit, "wait", limit, "time limit for all of it")
	f.DurationVar(&a.timeout, "timeout", 2*time.Minute, "time limit of one call")
	_ = c.MarkFlagRequired("file") // the flag exists
	a.endpointFlag(c)
	return c
}

// awaitTemplate waits until the node has the template for a pod's machine, and prints the template's name.
func (a *App) awaitTemplate(ctx context.Context, client *Client, p *played) error {
	tick := time.NewTicker(templatePoll)
	defer tick.Stop()
	for {
		resp, err := client.PodSandboxStatus(ctx, p.id, true)
		if err != nil {
			return fmt.Errorf("pod %s: PodSandboxStatus: %w", p.Name(), err)
		}
		var info struct {
			Template *struct {
				Name    string `json:"name"`
				Ready   bool   `json:"ready"`
				Problem string `json:"problem"`
			} `json:"template"`
		}
		if err := json.Unmarshal([]byte(resp.GetInfo()["info"]), &info); err != nil {
			return fmt.Errorf("pod %s: its status: %w", p.Name(), err)
		}
		switch t := info.Template; {
		case t == nil:
			return fmt.Errorf("pod %s: its machine does not continue from a template (see `tripod inspect`): %w", p.Name(),
				errdefs.ErrFailedPrecondition)
		case t.Problem != "":
			return fmt.Errorf("pod %s: the node makes no template: %s: %w", p.Name(), t.Problem, errdefs.ErrFailedPrecondition)
		case t.Ready:
			_, err := fmt.Fprintln(a.Stdout, t.Name)
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("pod %s: its template: %w", p.Name(), context.Cause(ctx))
		}
	}
}
