package builtin

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/invoke"
)

// Plugins runs plugins in this process. The zero value is ready to use.
type Plugins struct{ references references }

// Call is one execution of one plugin.
type Call struct {
	container, ifName string
	netns             string // path; empty for DEL if the namespace is gone
	stdin             []byte
	run               func(context.Context) ([]byte, error)
}

// Plan returns a Call to run in place of an executable. The arguments of Plan are what libcni would give to the
// executable: the path, the standard input and the environment. An error is not a failure: it is the reason to run the
// executable instead.
func (p *Plugins) Plan(path string, stdin []byte, environ []string) (*Call, error) {
	env := cniEnvironment(environ)
	command := env["CNI_COMMAND"]
	if command != "ADD" && command != "DEL" {
		return nil, fmt.Errorf("command %q", command)
	}
	if err := checkArgs(env["CNI_ARGS"]); err != nil {
		return nil, err
	}
	c := &Call{container: env["CNI_CONTAINERID"], ifName: env["CNI_IFNAME"], netns: env["CNI_NETNS"], stdin: stdin}
	if c.container == "" || c.ifName == "" || command == "ADD" && c.netns == "" {
		return nil, errors.New("an incomplete environment")
	}
	add := command == "ADD"
	name := filepath.Base(path)
	var err error
	switch name {
	case "bridge":
		err = c.planBridge(add, env["CNI_PATH"], &p.references)
	case "loopback":
		err = c.planLoopback(add)
	case "portmap":
		err = c.planPortmap(add)
	default:
		return nil, fmt.Errorf("plugin %q", name)
	}
	if err == nil && !p.references.match(path, name) {
		err = fmt.Errorf("%s is not the reference plugin", path)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Run executes the call. For ADD, it returns the result that the plugin would print.
func (c *Call) Run(ctx context.Context) (output []byte, err error) {
	return c.run(ctx)
}

func cniEnvironment(environ []string) map[string]string {
	env := map[string]string{}
	for _, entry := range environ {
		if name, value, ok := strings.Cut(entry, "="); ok && strings.HasPrefix(name, "CNI_") {
			env[name] = value // the last value wins
		}
	}
	return env
}

func (c *Call) planBridge(add bool, path string, references *references) error {
	conf := &bridgeConfig{}
	if err := c.load(conf); err != nil {
		return err
	}
	var ipam ipamConfig
	if err := decodeStrict(conf.IPAM, &ipam); err != nil {
		return fmt.Errorf("ipam: %w", err)
	}
	if ipam.Type != "host-local" {
		return fmt.Errorf("ipam type %q", ipam.Type)
	}
	executable, err := invoke.FindInPath(ipam.Type, filepath.SplitList(path))
	if err != nil {
		return err
	}
	if !references.match(executable, ipam.Type) {
		return fmt.Errorf("%s is not the reference plugin", executable)
	}
	if add {
		c.run = func(ctx context.Context) ([]byte, error) { return c.addBridge(ctx, conf) }
	} else {
		c.run = func(ctx context.Context) ([]byte, error) { return nil, c.delBridge(ctx, conf) }
	}
	return nil
}

func (c *Call) planLoopback(add bool) error {
	conf := &loopbackConfig{}
	if err := c.load(conf); err != nil {
		return err
	}
	if add {
		c.run = func(context.Context) ([]byte, error) { return c.addLoopback(conf) }
	} else {
		c.run = func(context.Context) ([]byte, error) { return nil, c.delLoopback() }
	}
	return nil
}
