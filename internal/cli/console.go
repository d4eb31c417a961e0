package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The keys that end a session: Ctrl-] for a console, as in telnet and virsh; Ctrl-P Ctrl-Q for a container, as in
// Docker.
const (
	consoleKeys = "\x1d"
	attachKeys  = "\x10\x11"
)

func (a *App) consoleCommand() *cobra.Command {
	var transport string
	c := &cobra.Command{
		Use: "console POD", Short: "Connect to the serial console of a virtual machine; Ctrl-] disconnects",
		Long: `Console connects the terminal to the console of a pod's only container, a virtual machine. It shows what the machine
writes from now on (tripod logs shows earlier output). It passes on all keys, including Ctrl-C, except Ctrl-], which
disconnects. The machine does not notice. The console of a container that was created without stdin is read-only.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := client.onlyContainer(ctx, args[0])
				if err != nil {
					return err
				}
				stdio, err := client.stdio(ctx, id)
				if err != nil {
					return err
				}
				resp, err := client.Attach(ctx, &runtimeapi.AttachRequest{
					ContainerId: id, Stdin: stdio.Stdin, Tty: stdio.TTY, Stdout: true, Stderr: !stdio.TTY,
				})
				if err != nil {
					return err
				}
				return a.console(ctx, resp.GetUrl(), transport, stdio)
			})
		},
	}
	c.Flags().StringVar(&transport, "transport", "spdy", "spdy or websocket")
	return c
}

// onlyContainer returns the ID of a pod's only running container.
func (c *Client) onlyContainer(ctx context.Context, pod string) (string, error) {
	id, err := c.Pod(ctx, pod)
	if err != nil {
		return "", err
	}
	running, err := c.runningContainers(ctx, id)
	if err != nil {
		return "", err
	}
	if len(running) != 1 {
		return "", fmt.Errorf("pod %s has %d running containers, not one: see `tripod ps -a`, or use `tripod attach`", pod, len(running))
	}
	return running[0].GetId(), nil
}

// runningContainers returns the running containers of the pod with this ID.
func (c *Client) runningContainers(ctx context.Context, pod string) ([]*runtimeapi.Container, error) {
	return c.ListContainers(ctx, &runtimeapi.ContainerFilter{
		PodSandboxId: pod, State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
	})
}

// stdio is the part of a container's configuration that concerns its standard streams.
type stdio struct {
	TTY   bool `json:"tty"`
	Stdin bool `json:"stdin"`
}

func (c *Client) stdio(ctx context.Context, id string) (stdio, error) {
	resp, err := c.ContainerStatus(ctx, id, true)
	if err != nil {
		return stdio{}, err
	}
	var info struct {
		Config stdio `json:"config"`
	}
	if err := json.Unmarshal([]byte(resp.GetInfo()["info"]), &info); err != nil {
		return stdio{}, fmt.Errorf("stdin and tty of container %s are unknown: %w", shortID(id), err)
	}
	return info.Config, nil
}

// console connects our streams to those behind the URL. Our terminal is raw even if the container was created without a
// tty, because the guest's own terminal driver echoes and edits lines.
func (a *App) console(ctx context.Context, address, transport string, o stdio) error {
	executor, err := newExecutor(address, transport)
	if err != nil {
		return err
	}
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	options := remotecommand.StreamOptions{Stdout: a.Stdout, Tty: o.TTY}
	if !o.TTY {
		options.Stderr = a.Stderr
	}
	if !o.Stdin {
		fmt.Fprintln(a.Stderr, "The container was created without stdin: its console is read-only.")
	} else {
		options.Stdin = &escape{from: a.Stdin, keys: consoleKeys, onMatch: leave}
		restore, err := a.raw()
		if err != nil {
			return err
		}
		defer restore()
	}
	err = executor.StreamWithContext(ctx, options)
	if ctx.Err() != nil {
		return nil // disconnected by Ctrl-], or interrupted
	}
	return withoutFrame(err)
}

// raw puts our terminal, if there is one, into raw mode and prints how to disconnect.
func (a *App) raw() (restore func(), err error) {
	f, unset, err := a.makeRaw()
	if f == nil || err != nil {
		return unset, err
	}
	fmt.Fprint(a.Stderr, "Connected to the console. Press Ctrl-] to disconnect.\r\n")
	return func() {
		unset()
		fmt.Fprintln(a.Stderr)
	}, nil
}

// makeRaw puts our terminal into raw mode. It returns a nil file if standard input is not a terminal.
func (a *App) makeRaw() (f *os.File, restore func(), err error) {
	f, ok := a.Stdin.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, func() {}, nil
	}
	before, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, nil, fmt.Errorf("terminal: %w", err)
	}
	return f, func() { _ = term.Restore(int(f.Fd()), before) }, nil
}

// escape passes input on until the escape keys appear in sequence. It holds a partial match back until the next key.
type escape struct {
	from    io.Reader
	keys    string
	onMatch func()

	matched int    // number of keys that match the end of the input
	out     []byte // input to pass on
	end     error
}

func (e *escape) Read(p []byte) (int, error) {
	buf := make([]byte, len(p))
	for len(e.out) == 0 && e.end == nil {
		n, err := e.from.Read(buf)
		e.end = err
		e.scan(buf[:n])
	}
	n := copy(p, e.out)
	e.out = e.out[n:]
	if n == 0 {
		return 0, e.end
	}
	return n, nil
}

// scan searches input for the keys.
func (e *escape) scan(read []byte) {
	for _, b := range read {
		if b != e.keys[e.matched] {
			e.out = append(e.out, e.keys[:e.matched]...)
			e.matched = 0
		}
		if b != e.keys[e.matched] {
			e.out = append(e.out, b)
			continue
		}
		if e.matched++; e.matched == len(e.keys) {
			e.onMatch()
			e.end = io.EOF
			return
		}
	}
	if e.end != nil {
		e.out = append(e.out, e.keys[:e.matched]...)
	}
}
