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
		a.inspectCommand("inspect CONTAINER...", "Show all details of containers", a.completeContainers,
			func(ctx context.Context, client *Client, arg string) (proto.Message, error) {
				id, err := client.Container(ctx, arg)
				if err != nil {
					return nil, err
				}
				return client.ContainerStatus(ctx, id, true)
			}),
		a.inspectCommand("inspectp POD...", "Show all details of pods", a.completePods,
			func(ctx context.Context, client *Client, arg string) (proto.Message, error) {
				id, err := client.Pod(ctx, arg)
				if err != nil {
					return nil, err
				}
				return client.PodSandboxStatus(ctx, id, true)
			}),
		a.inspectCommand("inspecti IMAGE...", "Show all details of images", nil,
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

func (a *App) inspectCommand(use, short string, complete cobra.CompletionFunc, get func(context.Context, *Client, string) (proto.Message, error)) *cobra.Command {
	var format string
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: complete,
		RunE: func(c *cobra.Command, args []string) error {
			if format != "json" && format != "yaml" {
				return fmt.Errorf("output format %q is neither json nor yaml", format)
			}
			a.format = format
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				for _, arg := range args {
					msg, err := get(ctx, client, arg)
					if err != nil {
						return err
					}
					document, err := jsonOf(msg)
					if err != nil {
						return err
					}
					if err := a.printJSON(document); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	c.Flags().StringVarP(&format, "output", "o", "json", "json or yaml")
	return c
}
