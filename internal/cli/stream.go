package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"
)

// streamOptions are the flags that exec and attach share.
type streamOptions struct {
	stdin, tty bool
	transport  string
	keys       string // keys that end the session when typed on a terminal
	inputOnly  bool
}

// errLeft says that the user has ended the session with its keys.
var errLeft = errors.New("the container goes on")

func (o *streamOptions) flags(c *cobra.Command, tty bool) {
	c.Flags().BoolVarP(&o.stdin, "interactive", "i", false, "pass standard input on")
	if tty {
		c.Flags().BoolVarP(&o.tty, "tty", "t", false, "give the program a terminal")
	}
	c.Flags().StringVar(&o.transport, "transport", "spdy", "spdy or websocket")
}

func (a *App) execCommand() *cobra.Command {
	var o streamOptions
	var sync bool
	var container string
	c := &cobra.Command{
		Use: "exec [-it] CONTAINER|POD [-c NAME] [--] COMMAND...", Short: "Run a command in a running container and exit with its exit code",
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completion(containerWords),
		RunE: func(c *cobra.Command, args []string) error {
			command, err := afterDashes(c, args[1:])
			if err != nil {
				return err
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := client.ContainerIn(ctx, args[0], container)
				if err != nil {
					return err
				}
				if sync {
					return a.execSync(ctx, client, id, command)
				}
				resp, err := client.Exec(ctx, &runtimeapi.ExecRequest{
					ContainerId: id, Cmd: command, Stdin: o.stdin, Tty: o.tty, Stdout: true, Stderr: !o.tty,
				})
				if err != nil {
					return err
				}
				return a.stream(ctx, resp.GetUrl(), o)
			})
		},
	}
	o.flags(c, true)
	containerFlag(c, &container)
	c.Flags().BoolVarP(&sync, "sync", "s", false, "use ExecSync: no streams, output at the end")
	c.Flags().SetInterspersed(false)
	return c
}

// afterDashes returns the command that follows a container. The library reads no flags there, because they may be the command's,
// unless there is a --, as kubectl's users write: exec POD -c NAME -- COMMAND.
func afterDashes(c *cobra.Command, words []string) ([]string, error) {
	i := slices.Index(words, "--")
	if i < 0 || i > 0 && !strings.HasPrefix(words[0], "-") {
		return words, nil
	}
	c.Flags().SetInterspersed(true)
	switch err := c.Flags().Parse(words[:i]); {
	case err != nil:
		return nil, err
	case c.Flags().NArg() > 0:
		return nil, fmt.Errorf("unexpected words before --: %s", strings.Join(c.Flags().Args(), " "))
	case i+1 == len(words):
		return nil, errors.New("name a command after --")
	}
	return words[i+1:], nil
}

func (a *App) execSync(ctx context.Context, client *Client, id string, cmd []string) error {
	stdout, stderr, err := client.ExecSync(ctx, id, cmd, 0)
	_, _ = a.Stdout.Write(stdout)
	_, _ = a.Stderr.Write(stderr)
	if code := ExitCode(err); code > 1 || (code == 1 && stdout != nil) {
		return &ExitError{Code: code} // the program has reported its failure itself
	}
	return err
}

func (a *App) attachCommand() *cobra.Command {
	var o streamOptions
	var container string
	c := &cobra.Command{
		Use:   "attach [-it] CONTAINER|POD [-c NAME]",
		Short: "Connect to the standard streams of a running container; with -it, Ctrl-P Ctrl-Q disconnects",
		Args:  cobra.ExactArgs(1), ValidArgsFunction: a.completion(containerWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := client.ContainerIn(ctx, args[0], container)
				if err != nil {
					return err
				}
				resp, err := client.Attach(ctx, &runtimeapi.AttachRequest{
					ContainerId: id, Stdin: o.stdin, Tty: o.tty, Stdout: true, Stderr: !o.tty,
				})
				if err != nil {
					return err
				}
				o.keys = attachKeys
				if err := a.stream(ctx, resp.GetUrl(), o); !errors.Is(err, errLeft) {
					return err
				}
				return nil
			})
		},
	}
	o.flags(c, true)
	containerFlag(c, &container)
	return c
}

// stream connects our streams to those behind the URL until the remote program ends or the client disconnects. It returns errLeft
// if the user has typed the keys.
func (a *App) stream(ctx context.Context, address string, o streamOptions) error {
	executor, err := newExecutor(address, o.transport)
	if err != nil {
		return err
	}
	options := remotecommand.StreamOptions{Tty: o.tty}
	if !o.inputOnly {
		options.Stdout = a.Stdout
	}
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	left := false
	switch {
	case o.stdin && o.tty && o.keys != "":
		options.Stdin = &escape{from: a.Stdin, keys: o.keys, onMatch: func() { left = true; leave() }}
	case o.stdin:
		options.Stdin = a.Stdin
	}
	if !o.tty && !o.inputOnly {
		options.Stderr = a.Stderr
	}
	restore := func() {}
	if o.tty {
		if options.TerminalSizeQueue, restore, err = a.terminal(ctx); err != nil {
			return err
		}
	}
	err = executor.StreamWithContext(ctx, options)
	restore()
	if left {
		return errLeft
	}
	if code := ExitCode(err); err != nil && isExit(err) {
		return &ExitError{Code: code}
	}
	return withoutFrame(err)
}

// withoutFrame removes the streaming server's prefixes from the runtime's message.
func withoutFrame(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, frame := range []string{"Internal error occurred: ", "error executing command in container: ", "error attaching to container: "} {
		text = strings.TrimPrefix(text, frame)
	}
	return errors.New(text)
}

func isExit(err error) bool {
	var exit interface {
		Exited() bool
		ExitStatus() int
	}
	return errors.As(err, &exit) && exit.Exited()
}

func newExecutor(address, transport string) (remotecommand.Executor, error) {
	target, err := parseTarget(address)
	if err != nil {
		return nil, err
	}
	config := restConfig(target)
	switch transport {
	case "spdy":
		return remotecommand.NewSPDYExecutor(config, http.MethodPost, target)
	case "websocket":
		return remotecommand.NewWebSocketExecutor(config, http.MethodGet, target.String())
	default:
		return nil, fmt.Errorf("--transport %q is neither spdy nor websocket", transport)
	}
}

func parseTarget(address string) (*url.URL, error) {
	target, err := url.Parse(address)
	if err != nil || target.Host == "" {
		return nil, fmt.Errorf("the runtime answered with an unusable stream address %q", address)
	}
	return target, nil
}

// restConfig returns the configuration for a node's own streaming server. It accepts the server's self-signed
// certificate, because both sides trust the one-time token in the URL, which came over the CRI socket.
func restConfig(target *url.URL) *rest.Config {
	c := &rest.Config{Host: target.Host}
	if target.Scheme == "https" {
		c.TLSClientConfig = rest.TLSClientConfig{Insecure: true}
	}
	return c
}

// terminal puts our terminal, if there is one, into raw mode and returns a queue of the terminal's sizes and a function
// that restores the terminal.
func (a *App) terminal(ctx context.Context) (remotecommand.TerminalSizeQueue, func(), error) {
	f, restore, err := a.makeRaw()
	if f == nil || err != nil {
		return nil, restore, err
	}
	ctx, stop := context.WithCancel(ctx)
	return newSizes(ctx, f), func() {
		stop()
		restore()
	}, nil
}

// sizes is a remotecommand.TerminalSizeQueue that follows SIGWINCH.
type sizes struct {
	next chan remotecommand.TerminalSize
}

func newSizes(ctx context.Context, f *os.File) *sizes {
	s := &sizes{next: make(chan remotecommand.TerminalSize, 1)}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGWINCH)
	go func() {
		defer close(s.next)
		defer signal.Stop(changed)
		for {
			if width, height, err := term.GetSize(int(f.Fd())); err == nil {
				select {
				case s.next <- remotecommand.TerminalSize{Width: uint16(width), Height: uint16(height)}:
				case <-ctx.Done():
					return
				}
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return s
}

func (s *sizes) Next() *remotecommand.TerminalSize {
	if size, ok := <-s.next; ok {
		return &size
	}
	return nil
}

func (a *App) portForwardCommand() *cobra.Command {
	var address []string
	var stdio bool
	c := &cobra.Command{
		Use: "port-forward POD [LOCAL:]REMOTE...", Short: "Forward local TCP ports to ports inside a pod, until interrupted",
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error {
			if stdio && len(args) != 2 {
				return errors.New("--stdio is for one port")
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := client.Pod(ctx, args[0])
				if err != nil {
					return err
				}
				resp, err := client.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: id})
				if err != nil {
					return err
				}
				if stdio {
					return a.connect(ctx, resp.GetUrl(), args[1])
				}
				return a.portForward(ctx, resp.GetUrl(), address, args[1:])
			})
		},
	}
	c.Flags().StringSliceVar(&address, "address", []string{"localhost"}, "local addresses to listen on")
	c.Flags().BoolVar(&stdio, "stdio", false, "connect standard input and output to one port, for the ProxyCommand of ssh")
	c.MarkFlagsMutuallyExclusive("stdio", "address")
	return c
}

func (a *App) portForward(ctx context.Context, address string, listen, ports []string) error {
	dialer, err := portDialer(address)
	if err != nil {
		return err
	}
	forwarder, err := portforward.NewOnAddressesForStreamingWithContext(ctx, dialer, listen, ports, nil, a.Stdout, a.Stderr)
	if err != nil {
		return err
	}
	if err := forwarder.ForwardPorts(); err != nil && ctx.Err() == nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func portDialer(address string) (httpstream.Dialer, error) {
	target, err := parseTarget(address)
	if err != nil {
		return nil, err
	}
	transport, upgrader, err := spdy.RoundTripperFor(restConfig(target))
	if err != nil {
		return nil, err
	}
	return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, target), nil
}

// connect connects our standard input and output to a port in a pod, until the pod closes the connection. The end of our
// input closes only our direction.
func (a *App) connect(ctx context.Context, address, port string) error {
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%q is not a port", port)
	}
	dialer, err := portDialer(address)
	if err != nil {
		return err
	}
	connection, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return err
	}
	defer connection.Close()
	defer context.AfterFunc(ctx, func() { _ = connection.Close() })()
	headers := http.Header{}
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	headers.Set(corev1.PortHeader, port)
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	failure, err := connection.CreateStream(headers)
	if err != nil {
		return err
	}
	_ = failure.Close() // nothing is written to it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := connection.CreateStream(headers)
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(data, a.Stdin)
		_ = data.Close()
	}()
	_, copyErr := io.Copy(a.Stdout, data)
	_ = data.Reset() // ends our direction too, for which the node would wait
	message, err := io.ReadAll(failure)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case len(message) > 0:
		return withoutFrame(errors.New(string(message)))
	}
	select {
	case <-connection.CloseChan():
		return fmt.Errorf("lost the connection to the node: %w", errdefs.ErrUnavailable)
	default:
		return errors.Join(copyErr, err)
	}
}
