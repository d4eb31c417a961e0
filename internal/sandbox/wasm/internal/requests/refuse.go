package requests

import (
	"errors"
	"net/http"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// refusal is an error that the router itself responds with.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

// code returns the gRPC code of a refusal.
func (r *refusal) code() codes.Code {
	switch r.status {
	case http.StatusNotFound:
		return codes.Unimplemented
	case http.StatusConflict:
		return codes.FailedPrecondition
	}
	return codes.Unavailable
}

// refuse answers a request with an error, in the protocol of the request: HTTP, or gRPC with the status in the header.
func refuse(w http.ResponseWriter, req *http.Request, err error) {
	r, ok := errors.AsType[*refusal](err)
	if !ok {
		r = &refusal{http.StatusBadGateway, err.Error()}
	}
	media := dataplane.MediaType(req.Header)
	if !dataplane.IsGRPCFamily(media) {
		http.Error(w, r.message, r.status)
		return
	}
	w.Header().Set("Content-Type", media)
	w.Header().Set("Grpc-Status", strconv.Itoa(int(r.code())))
	// nothing else to encode: names in the message are ASCII or quoted
	w.Header().Set("Grpc-Message", strings.ReplaceAll(r.message, "%", "%25"))
	w.WriteHeader(http.StatusOK)
}
