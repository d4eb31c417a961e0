package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"
)

// The subprotocols of WebSocket sessions. To a client that names none, the libraries speak an older one without a name.
var (
	stdioProtocols = []string{remotecommand.StreamProtocolV5Name, "v4.channel.k8s.io", "v4.base64.channel.k8s.io",
		wsstream.ChannelWebSocketProtocol, wsstream.Base64ChannelWebSocketProtocol}
	forwardProtocols = []string{portforward.WebsocketsSPDYTunnelingPortForwardV1, "v4.channel.k8s.io", "v4.base64.channel.k8s.io"}
)

// speaks reports whether the session can speak one of the subprotocols that a WebSocket client asks for. Otherwise it answers
// with those that it speaks; the libraries would answer with 403 and nothing else.
func speaks(w http.ResponseWriter, r *http.Request, protocols []string) bool {
	asked := websocket.Subprotocols(r)
	if !wsstream.IsWebSocketRequest(r) || len(asked) == 0 ||
		slices.ContainsFunc(asked, func(p string) bool { return slices.Contains(protocols, p) }) {
		return true
	}
	http.Error(w, fmt.Sprintf("none of the subprotocols %s is spoken here; ask for one of %s", strings.Join(asked, ", "),
		strings.Join(protocols, ", ")),
		http.StatusBadRequest)
	return false
}

// serveWebSocketV5 serves an exec or attach session in the protocol v5.channel.k8s.io (KEP-4006), which is v4 plus a
// signal to close stdin. kubectl and other programs that use client-go speak this protocol.
func (s *Server) serveWebSocketV5(ss *session, r *http.Request, opts *remotecommand.Options, session stdioSession) {
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		remotecommand.StreamProtocolV5Name: {Binary: true, Channels: []wsstream.ChannelType{
			remotecommand.StreamStdIn:  channelType(opts.Stdin, wsstream.ReadChannel),
			remotecommand.StreamStdOut: channelType(opts.Stdout, wsstream.WriteChannel),
			remotecommand.StreamStdErr: channelType(opts.Stderr, wsstream.WriteChannel),
			remotecommand.StreamErr:    wsstream.WriteChannel,
			remotecommand.StreamResize: wsstream.ReadChannel,
		}},
	})
	conn.SetIdleTimeout(s.config.IdleTimeout)
	_, channels, err := conn.Open(ss, r)
	if err != nil {
		s.log.Debug("WebSocket session refused", "err", err)
		return
	}
	defer conn.Close()
	err = session.serve(ss.ctx, channels[remotecommand.StreamStdIn], channels[remotecommand.StreamStdOut],
		channels[remotecommand.StreamStdErr], decodeSizes(ss.ctx, channels[remotecommand.StreamResize]))
	if err := json.NewEncoder(channels[remotecommand.StreamErr]).Encode(statusOf(err)); err != nil {
		s.log.Debug("client gone before the end of its WebSocket session", "err", err)
	}
}

func channelType(wanted bool, kind wsstream.ChannelType) wsstream.ChannelType {
	if !wanted {
		return wsstream.IgnoreChannel
	}
	return kind
}

// decodeSizes reads terminal sizes from JSON until reading fails or ctx ends.
func decodeSizes(ctx context.Context, from io.Reader) <-chan remotecommand.TerminalSize {
	to := make(chan remotecommand.TerminalSize)
	go func() {
		defer close(to)
		for decoder := json.NewDecoder(from); ; {
			var size remotecommand.TerminalSize
			if decoder.Decode(&size) != nil {
				return
			}
			select {
			case to <- size:
			case <-ctx.Done():
				return
			}
		}
	}()
	return to
}

// status is the part of Kubernetes' metav1.Status that reports the result of an exec session.
type status struct {
	Status  string         `json:"status"`
	Message string         `json:"message,omitempty"`
	Reason  string         `json:"reason,omitempty"`
	Details *statusDetails `json:"details,omitempty"`
	Code    int32          `json:"code,omitempty"`
}

type statusDetails struct {
	Causes []statusCause `json:"causes"`
}

// statusCause is metav1.StatusCause. In JSON, Type is called "reason".
type statusCause struct {
	Type    string `json:"reason"`
	Message string `json:"message"`
}

func statusOf(err error) status {
	var exit utilexec.ExitError
	switch {
	case err == nil:
		return status{Status: "Success"}
	case errors.As(err, &exit) && exit.Exited():
		cause := statusCause{Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exit.ExitStatus())}
		return status{
			Status:  "Failure",
			Message: "command terminated with non-zero exit code: " + err.Error(),
			Reason:  remotecommand.NonZeroExitCodeReason,
			Details: &statusDetails{Causes: []statusCause{cause}},
		}
	}
	return status{Status: "Failure", Message: err.Error(), Reason: "InternalError", Code: http.StatusInternalServerError}
}
