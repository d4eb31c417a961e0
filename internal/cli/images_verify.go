package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/metadata"

	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/image"
)

// verifyTimeout limits the duration of a check that reads all images, which can be terabytes.
const verifyTimeout = 2 * time.Hour

func (a *App) verifyImagesCommand() *cobra.Command {
	var quick bool
	c := &cobra.Command{
		Use: "verify", Short: "Check all images for damage (exit code 1: damaged); pulling an image again repairs it", Args: cobra.NoArgs,
		Long: `Compare the images' blobs, unpacked layers and records with each other and with their digests. Verify changes nothing:
the next pull of an image repairs its damage, even while containers run from it. With --quick it does not read files. It
then finds only missing, empty and truncated files, as the daemon does at each start.`,
		RunE: func(c *cobra.Command, _ []string) error {
			found, raw, err := VerifyImages(Quiet(c.Context()), a.endpoint, !quick)
			if err != nil {
				return err
			}
			err = a.Print(json.RawMessage(raw), func(bool) error { return a.listDamages(found) })
			if err == nil && len(found) > 0 {
				err = &ExitError{Code: 1}
			}
			return err
		},
	}
	a.endpointFlag(c)
	c.Flags().BoolVar(&quick, "quick", false, "find only missing, empty and truncated files, without reading them")
	a.OutputFlag(c)
	return c
}

// VerifyImages makes the daemon at endpoint check its images. It returns the damage, and also the JSON that the daemon
// sent. If contents is set, the daemon reads all images.
func VerifyImages(ctx context.Context, endpoint string, contents bool) (found []image.Damage, raw []byte, err error) {
	client, err := Connect(ctx, endpoint, verifyTimeout)
	if err != nil {
		return nil, nil, err
	}
	defer client.Close(context.WithoutCancel(ctx))
	how := cri.HeaderVerifyPresence
	if contents {
		how = cri.HeaderVerifyContents
	}
	resp, err := client.Status(metadata.AppendToOutgoingContext(ctx, cri.HeaderVerify, how), true)
	if err != nil {
		return nil, nil, err
	}
	raw = []byte(resp.GetInfo()["images"])
	if err := json.Unmarshal(raw, &found); err != nil {
		return nil, nil, fmt.Errorf("the daemon cannot verify images; if it is older than this program, restart it: %w", err)
	}
	return found, raw, nil
}

func (a *App) listDamages(found []image.Damage) error {
	t := newTable(a.Stdout, "KIND", "ID", "IMAGE", "USED BY", "DAMAGE")
	for _, d := range found {
		name := d.Image
		if len(d.Names) > 0 {
			name = d.Names[0]
		}
		t.row(d.Kind, d.ID, cmp.Or(name, "-"), cmp.Or(strings.Join(d.Users, ","), "-"), d.Detail)
	}
	return t.flush()
}
