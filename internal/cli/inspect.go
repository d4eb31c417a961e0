package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (a *App) inspectCommands() []*cobra.Command {
	return []*cobra.Command{
		a.inspectCommand("inspect CONTAINER...", "Show all details of containers", a.completion(containerWords),
			func(ctx context.Context, client *Client, arg string) (proto.Message, error) {
				id, err := client.Container(ctx, arg)
				if err != nil {
					return nil, err
				}
				return client.ContainerStatus(ctx, id, true)
			}),
		a.inspectCommand("inspectp POD...", "Show all details of pods", a.completion(podWords),
			func(ctx context.Context, client *Client, arg string) (proto.Message, error) {
				id, err := client.Pod(ctx, arg)
				if err != nil {
					return nil, err
				}
				return client.PodSandboxStatus(ctx, id, true)
			}),
		a.inspectCommand("inspecti IMAGE...", "Show all details of images", a.completion(imageWords),
			func(ctx context.Context, client *Client, arg string) (proto.Message, error) {
				ref, err := client.Image(ctx, arg)
				if err != nil {
					return nil, err
				}
				resp, err := client.Images.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: ref}, true)
				if err == nil && resp.GetImage() == nil {
					err = fmt.Errorf("no image %q", arg)
				}
				return resp, err
			}),
	}
}

func (a *App) inspectCommand(use, short string, complete cobra.CompletionFunc,
	get func(context.Context, *Client, string) (proto.Message, error)) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: complete,
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				for _, arg := range args {
					msg, err := get(ctx, client, arg)
					if err != nil {
						return err
					}
					if err := a.Print(msg, nil); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	a.outputFlag(c, c.Flags(), formatJSON, formatYAML)
	return c
}
