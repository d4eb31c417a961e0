package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/spf13/pflag"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/codelayer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/standalone"
)

// compiledPush is the part of `tripod push` that adds compiled code to an image.
type compiledPush struct {
	wanted bool
	key    string
}

func (p *compiledPush) flags(f *pflag.FlagSet) {
	f.BoolVar(&p.wanted, "compiled", false,
		"compile the component, and add the signed code for nodes like this machine (needs tripod-wasm and --key)")
	f.StringVar(&p.key, "key", "", "Ed25519 private key (PEM) that signs the code")
}

func (p *compiledPush) check() error {
	switch {
	case p.wanted && p.key == "":
		return fmt.Errorf("--compiled needs --key: nodes accept compiled code only with a signature: %w", errdefs.ErrInvalidArgument)
	case !p.wanted && p.key != "":
		return fmt.Errorf("--key is for --compiled: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// addTo compiles and signs the component, if this is wanted.
func (p *compiledPush) addTo(ctx context.Context, spec *artifact.Spec) error {
	if !p.wanted {
		return nil
	}
	key, err := codelayer.ReadPrivateKey(p.key) // before the long part
	if err != nil {
		return err
	}
	c := config.Default().Wasm
	code, engine, err := standalone.Compile(ctx, standalone.Config{
		Program: c.Program, UID: c.User, GID: c.User, CompileTimeout: time.Duration(c.CompileTimeout), CompileMemory: c.CompileMemory,
	}, spec.Wasm)
	if err != nil {
		return err
	}
	target := codelayer.Target{Component: digest.FromBytes(spec.Wasm), Engine: engine, Features: codelayer.HostFeatures()}
	spec.Code, spec.Envelope, err = codelayer.Pack(ctx, key, target, code)
	return err
}
