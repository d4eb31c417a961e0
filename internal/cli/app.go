package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/metadata"
	"k8s.io/klog/v2"

	"github.com/tripod-run/tripod/internal/cri"
)

// DefaultEndpoint is the socket of a node with the default configuration.
const DefaultEndpoint = "unix:///run/tripod/tripod.sock"

// EndpointVariable is the environment variable that overrides DefaultEndpoint. crictl reads it too.
const EndpointVariable = "CONTAINER_RUNTIME_ENDPOINT"

// Group is the cobra group of this package's commands.
const Group = "cri"

// App holds the streams and flags that the commands share.
type App struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer

	endpoint string
	timeout  time.Duration
	format   string
	quiet    bool

	// exec is unix.Exec if nil. The new program has the process's own streams, whatever Stdin, Stdout and Stderr are.
	exec func(program string, args, env []string) error
}

// ExitError ends the program with a specific exit code, such as the exit code of the program that `tripod exec` ran.
// Err may be nil.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err != nil {
		return e.Err.Error()
	}
	return fmt.Sprintf("exit code %d", e.Code)
}

func (e *ExitError) Unwrap() error { return e.Err }

// Commands returns all commands of the package, for the caller's root command.
func (a *App) Commands() []*cobra.Command {
	all := append([]*cobra.Command{
		a.podsCommand(), a.stoppCommand(), a.rmpCommand(), a.psCommand(), a.startCommand(), a.stopCommand(), a.rmCommand(),
		a.imagesCommand(), a.pullCommand(), a.rmiCommand(), a.runpCommand(), a.createCommand(), a.runCommand(), a.logsCommand(),
		a.execCommand(), a.attachCommand(), a.consoleCommand(), a.sshCommand(), a.portForwardCommand(), a.statsCommand(), a.topCommand(),
		a.infoCommand(), a.eventsCommand(),
	}, a.inspectCommands()...)
	for _, c := range all {
		c.GroupID = Group
		a.endpointFlag(c)
		c.Flags().DurationVar(&a.timeout, "timeout", 2*time.Minute, "time limit of one call")
	}
	return all
}

func (a *App) endpointFlag(c *cobra.Command) {
	c.Flags().StringVar(&a.endpoint, "endpoint", cmp.Or(os.Getenv(EndpointVariable), DefaultEndpoint),
		"CRI socket of the node ($"+EndpointVariable+")")
}

func (a *App) formatFlags(c *cobra.Command, quiet string) {
	a.OutputFlag(c)
	if quiet != "" {
		c.Flags().BoolVarP(&a.quiet, "quiet", "q", false, quiet)
	}
}

// withClient connects a client and passes it to the given function.
func (a *App) withClient(c *cobra.Command, do func(context.Context, *Client) error) error {
	ctx := metadata.AppendToOutgoingContext(Quiet(c.Context()), cri.HeaderPods, cri.HeaderPodsAll)
	client, err := Connect(ctx, a.endpoint, a.timeout)
	if err != nil {
		return err
	}
	defer client.Close(context.WithoutCancel(ctx))
	return do(ctx, client)
}

// Quiet returns a context for the calls of a Client. With this context, cri-client does not log errors to klog; the
// calls still return them.
func Quiet(ctx context.Context) context.Context { return klog.NewContext(ctx, logr.Discard()) }
