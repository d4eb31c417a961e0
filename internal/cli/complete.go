package cli

import (
	"context"
	"slices"

	"github.com/spf13/cobra"
)

// completion completes arguments or a flag in the shell with the words that list returns: each a word, or a word, a tab
// and its description. It completes nothing if the node does not answer.
func (a *App) completion(list func(context.Context, *Client) ([]string, error)) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		var words []string
		_ = a.withClient(c, func(ctx context.Context, client *Client) (err error) {
			words, err = list(ctx, client)
			return err
		})
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeFlag completes a flag of the command in the shell with the words that list returns.
func (a *App) completeFlag(c *cobra.Command, flag string, list func(context.Context, *Client) ([]string, error)) {
	_ = c.RegisterFlagCompletionFunc(flag, a.completion(list)) // the only error is a flag that does not exist
}

func podWords(ctx context.Context, client *Client) (words []string, err error) {
	pods, err := client.ListPodSandbox(ctx, nil)
	for _, p := range pods {
		words = append(words, shortID(p.GetId())+"\t"+p.GetMetadata().GetName())
	}
	return words, err
}

func containerWords(ctx context.Context, client *Client) (words []string, err error) {
	containers, err := client.ListContainers(ctx, nil)
	for _, k := range containers {
		words = append(words, shortID(k.GetId())+"\t"+k.GetMetadata().GetName())
	}
	return words, err
}

func imageWords(ctx context.Context, client *Client) (words []string, err error) {
	images, err := client.Images.ListImages(ctx, nil)
	for _, i := range images {
		words = append(words, i.GetRepoTags()...)
	}
	return words, err
}

func namespaceWords(ctx context.Context, client *Client) (words []string, err error) {
	pods, err := client.ListPodSandbox(ctx, nil)
	for _, p := range pods {
		words = append(words, p.GetMetadata().GetNamespace())
	}
	slices.Sort(words)
	return slices.Compact(words), err
}

func handlerWords(ctx context.Context, client *Client) (words []string, err error) {
	resp, err := client.Status(ctx, false)
	for _, h := range resp.GetRuntimeHandlers() {
		if h.GetName() != "" {
			words = append(words, h.GetName())
		}
	}
	return words, err
}

// completeRun completes the first argument of `tripod run` with images, or with files if no image matches.
func (a *App) completeRun(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	words, _ := a.completion(imageWords)(c, args, word)
	return words, cobra.ShellCompDirectiveDefault
}
