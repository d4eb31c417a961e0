package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/sandbox"
)

func (a *App) imagesCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "images [REFERENCE]", Short: "List images", Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.completion(imageWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				filter := &runtimeapi.ImageFilter{}
				if len(args) == 1 {
					filter.Image = &runtimeapi.ImageSpec{Image: args[0]}
				}
				images, err := client.Images.ListImages(ctx, filter)
				if err != nil {
					return err
				}
				return a.listImages(ctx, client, images)
			})
		},
	}
	a.formatFlags(c, "print only IDs")
	c.AddCommand(a.verifyImagesCommand())
	return c
}

func (a *App) listImages(ctx context.Context, client *Client, images []*runtimeapi.Image) error {
	slices.SortFunc(images, func(x, y *runtimeapi.Image) int { return strings.Compare(firstName(x), firstName(y)) })
	if a.quiet {
		for _, i := range images {
			fmt.Fprintln(a.Stdout, i.GetId())
		}
		return nil
	}
	return a.Print(&runtimeapi.ListImagesResponse{Images: images}, func(wide bool) error { return a.imageTable(ctx, client, images, wide) })
}

// imageTable prints a table of images. The wide one asks for the state of each image's component.
func (a *App) imageTable(ctx context.Context, client *Client, images []*runtimeapi.Image, wide bool) error {
	header := []string{"IMAGE", "TAG", "IMAGE ID", "SIZE"}
	if wide {
		header = append(header, "PINNED", "USER", "CODE", "DIGESTS")
	}
	t := newTable(a.Stdout, header...)
	for _, i := range images {
		code := "-"
		if wide {
			var err error
			if code, err = client.CodeOf(ctx, i.GetId()); err != nil {
				return err
			}
		}
		for _, tag := range namesOf(i) {
			name, label := splitTag(tag)
			row := []string{name, label, shortID(i.GetId()), size(i.GetSize())}
			if wide {
				row = append(row, fmt.Sprint(i.GetPinned()), userOf(i), code, strings.Join(i.GetRepoDigests(), ","))
			}
			t.row(row...)
		}
	}
	return t.flush()
}

// codeShipped is shown for machine code that this node did not compile, because the image has brought it along.
const codeShipped = "shipped"

// CodeOf returns the state of the machine code of an image's component, or "-" if the image has no component.
func (c *Client) CodeOf(ctx context.Context, id string) (string, error) {
	resp, err := c.Images.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: id}, true)
	if err != nil {
		return "", err
	}
	var info map[string]json.RawMessage
	var compilation sandbox.Compilation
	_ = json.Unmarshal([]byte(resp.GetInfo()["info"]), &info) // other runtimes have other information
	_ = json.Unmarshal(info[cri.InfoCompilation], &compilation)
	if compilation.Key != "" {
		return codeShipped, nil
	}
	return cmp.Or(string(compilation.State), "-"), nil
}

func namesOf(i *runtimeapi.Image) []string {
	if len(i.GetRepoTags()) > 0 {
		return i.GetRepoTags()
	}
	if len(i.GetRepoDigests()) > 0 {
		name, _, _ := strings.Cut(i.GetRepoDigests()[0], "@")
		return []string{name + ":<none>"}
	}
	return []string{"<none>:<none>"}
}

func firstName(i *runtimeapi.Image) string { return namesOf(i)[0] }

// splitTag splits a reference at the colon before the tag, not at the colon before a port.
func splitTag(ref string) (name, tag string) {
	if i := strings.LastIndexByte(ref, ':'); i > strings.LastIndexByte(ref, '/') {
		return ref[:i], ref[i+1:]
	}
	return ref, "<none>"
}

func userOf(i *runtimeapi.Image) string {
	switch {
	case i.GetUid() != nil:
		return fmt.Sprint(i.GetUid().GetValue())
	case i.GetUsername() != "":
		return i.GetUsername()
	default:
		return "-"
	}
}

func (a *App) pullCommand() *cobra.Command {
	var creds string
	c := &cobra.Command{
		Use: "pull REFERENCE", Short: "Pull an image", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				auth, err := parseCreds(creds)
				if err != nil {
					return err
				}
				id, err := a.pull(ctx, client, &runtimeapi.ImageSpec{Image: args[0]}, auth)
				if err != nil {
					return err
				}
				return a.printPulled(ctx, client, id)
			})
		},
	}
	a.OutputFlag(c)
	c.Flags().StringVar(&creds, "creds", "", "USER:PASSWORD for the registry; @FILE reads it from a file and keeps it out of process lists")
	return c
}

// printPulled prints the image's ID, or in other formats the image with its names and digests.
func (a *App) printPulled(ctx context.Context, client *Client, id string) error {
	if a.asID() {
		_, err := fmt.Fprintln(a.Stdout, id)
		return err
	}
	image, err := client.ImageStatus(ctx, id)
	if err == nil && image == nil {
		err = fmt.Errorf("image %s was removed again", shortID(id))
	}
	if err != nil {
		return err
	}
	return a.Print(image, func(wide bool) error { return a.imageTable(ctx, client, []*runtimeapi.Image{image}, wide) })
}

func parseCreds(creds string) (*runtimeapi.AuthConfig, error) {
	if creds == "" {
		return nil, nil
	}
	if path, ok := strings.CutPrefix(creds, "@"); ok {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		creds = strings.TrimSpace(string(text))
	}
	user, password, ok := strings.Cut(creds, ":")
	if !ok || user == "" {
		return nil, fmt.Errorf("--creds is not USER:PASSWORD")
	}
	return &runtimeapi.AuthConfig{Username: user, Password: password}, nil
}

// pull pulls an image and shows the progress.
func (a *App) pull(ctx context.Context, client *Client, image *runtimeapi.ImageSpec, auth *runtimeapi.AuthConfig) (string, error) {
	p := a.newProgress("pulling " + image.GetImage())
	id, err := client.Pull(ctx, &runtimeapi.PullImageRequest{Image: image, Auth: auth}, p.set)
	p.end(err)
	return id, err
}

func (a *App) rmiCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rmi IMAGE...", Short: "Remove images", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completion(imageWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				return a.each(args,
					func(arg string) (string, error) { return client.Image(ctx, arg) },
					func(ref string) error { return client.Images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: ref}) })
			})
		},
	}
}

// Image resolves an argument for RemoveImage and ImageStatus. The argument is a reference or a prefix of an ID.
func (c *Client) Image(ctx context.Context, arg string) (string, error) {
	image, err := c.ImageStatus(ctx, arg)
	if err == nil && image != nil {
		return arg, nil
	}
	images, listErr := c.Images.ListImages(ctx, nil)
	if listErr != nil {
		return "", listErr
	}
	var all []named
	full := map[string]string{}
	for _, i := range images {
		digits := strings.TrimPrefix(i.GetId(), "sha256:")
		all = append(all, named{id: digits})
		full[digits] = i.GetId()
	}
	digits, pickErr := pick("image", strings.TrimPrefix(arg, "sha256:"), all)
	if pickErr != nil && err != nil {
		return "", err
	}
	return full[digits], pickErr
}
