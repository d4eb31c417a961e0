package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/pflag"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// ComponentCheck is the part of `tripod check` that looks at a component, without a node.
type ComponentCheck struct {
	description
	registries registryFlags
	timeout    time.Duration
}

// Flags adds the flags that say how to find and to read a component.
func (k *ComponentCheck) Flags(f *pflag.FlagSet) {
	k.flags(f)
	k.registries.flags(f)
	f.DurationVar(&k.timeout, "timeout", 10*time.Minute, "timeout for a component")
}

// Unused returns errdefs.ErrInvalidArgument if a flag describes a component, but there is none to check.
func (k *ComponentCheck) Unused(f *pflag.FlagSet) error {
	for _, name := range []string{"proto", "descriptors", "service"} {
		if f.Changed(name) {
			return fmt.Errorf("--%s describes a component: name its file, directory or image: %w", name, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// checked is the result of a check.
type checked struct {
	Name     string          `json:"name"`
	World    artifact.World  `json:"world"`
	Services []string        `json:"services,omitempty"`
	Route    *artifact.Route `json:"route"`
	Warnings []string        `json:"warnings,omitempty"`
}

// Run checks the component in a file, in a directory with a server, or in an image of a registry, and prints how
// nodes run it. It returns errdefs.ErrInvalidArgument for one that no node runs.
func (k *ComponentCheck) Run(ctx context.Context, app *App, what string) error {
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	result, err := k.load(ctx, app, what)
	if err != nil {
		return err
	}
	c := checked{what, result.World, result.Services, result.Route, result.Warnings}
	return app.Print(c, func(bool) error {
		kind := string(c.World)
		if len(c.Services) > 0 {
			kind += " (" + strings.Join(c.Services, ", ") + ")"
		}
		if _, err := fmt.Fprintf(app.Stdout, "%s: %s; %s\n", c.Name, kind, c.Route); err != nil {
			return err
		}
		for _, w := range c.Warnings {
			fmt.Fprintln(app.Stderr, "tripod check: warning:", w)
		}
		return nil
	})
}

func (k *ComponentCheck) load(ctx context.Context, app *App, what string) (*pushed, error) {
	_, err := os.Stat(what)
	if errors.Is(err, fs.ErrNotExist) && filepath.Ext(what) != ".wasm" {
		return k.loadImage(ctx, what)
	}
	_, result, err := (&push{app: app, description: k.description}).load(ctx, what)
	if errors.Is(err, errDisk) {
		return nil, fmt.Errorf("%s: %w: %w", what, err, errdefs.ErrInvalidArgument)
	}
	return result, err
}

// loadImage looks at an image in its registry. Descriptors in the image take precedence over those of the flags.
func (k *ComponentCheck) loadImage(ctx context.Context, ref string) (*pushed, error) {
	auth, err := k.registries.auth()
	if err != nil {
		return nil, err
	}
	fetched, err := image.FetchComponent(ctx, k.registries.Config, ref, auth)
	if err != nil {
		return nil, err
	}
	if fetched.Layout == image.LayoutVimana {
		return nil, fmt.Errorf("%s: the layout of Vimana; check the .wasm file with --proto: %w", ref, errdefs.ErrNotImplemented)
	}
	if services := keys.Value(fetched.Annotations, keys.Services); services != "" && len(k.services) == 0 {
		k.services = strings.Split(services, ",")
	}
	result, err := k.judge(ctx, &artifact.Spec{Wasm: fetched.Binary, Descriptors: fetched.DescriptorSet})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", ref, err)
	}
	return result, nil
}
