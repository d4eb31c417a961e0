package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/internal/cri"
)

// nodeRuntime is the type of the runtime that runs images of its node.
const nodeRuntime = "tripod/wasm"

// pieceSize is the size of one message of an upload, in bytes.
const pieceSize = 1 << 20

// uploadModule imports a file of this machine as an image of this machine's node, and returns the image's reference. The
// module must then run on that node, so uploadModule also returns its runtime: the given one, or the only one alive.
func (a *App) uploadModule(ctx context.Context, o *edgeOptions, file, runtime string) (ref, chosen string, err error) {
	f, err := os.Open(file)
	if err != nil {
		return "", "", err
	}
	defer f.Close()
	client, err := Connect(Quiet(ctx), a.endpoint, o.timeout)
	if err != nil {
		return "", "", fmt.Errorf("--upload imports the file through the socket of a node on this machine: %w. For another node, copy the file "+
			"below its edge.module_roots, or run the image that `tripod push` makes", err)
	}
	defer client.Close(context.WithoutCancel(ctx))
	if err := a.awaitRuntime(ctx, o, runtime); err != nil {
		return "", "", err
	}
	if runtime == "" {
		if runtime, err = o.onlyRuntime(ctx); err != nil {
			return "", "", err
		}
	}
	if ref, err = client.ImportModule(Quiet(ctx), f); err != nil {
		return "", "", fmt.Errorf("upload %s: %w", file, err)
	}
	return ref, runtime, nil
}

// onlyRuntime returns the uuid of the runtime that runs images of a node, if only one such runtime is alive.
func (o *edgeOptions) onlyRuntime(ctx context.Context) (string, error) {
	all, err := o.list(ctx, "runtimes")
	if err != nil {
		return "", err
	}
	var alive []string
	for i := range all {
		if all[i].Status == "A" && all[i].Runtime == nodeRuntime {
			alive = append(alive, all[i].UUID)
		}
	}
	if len(alive) != 1 {
		return "", fmt.Errorf("--upload needs --runtime with the %s runtime of this machine's node: alive are %d (%s): %w",
			nodeRuntime, len(alive), strings.Join(alive, ", "), errdefs.ErrFailedPrecondition)
	}
	return alive[0], nil
}

// ImportModule imports a WebAssembly binary as an image of the node and returns the image's reference with its digest.
func (c *Client) ImportModule(ctx context.Context, wasm io.Reader) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, cri.ImportModuleMethod)
	if err != nil {
		return "", err
	}
	for piece := make([]byte, pieceSize); ; {
		n, err := io.ReadFull(wasm, piece)
		if n > 0 && stream.SendMsg(wrapperspb.Bytes(piece[:n])) != nil {
			break // the node has ended the stream; RecvMsg returns the reason
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return "", err
		}
	}
	_ = stream.CloseSend() // its error is the end of the stream, whose reason RecvMsg returns
	ref := &wrapperspb.StringValue{}
	err = stream.RecvMsg(ref)
	return ref.GetValue(), err
}
