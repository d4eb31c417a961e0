package router

import (
	"errors"
	"net/http"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
)

// refusal is a request's answer from the router itself.
type refusal struct {
	status  int
	message string
}

func (r *refusal) Error() string { return r.message }

// codeOf is the gRPC code of a refusal.
func (r *refusal) code() codes.Code {
	switch r.status {
	case http.StatusNotFound:
		return codes.Unimplemented
	case http.StatusConflict:
		return codes.FailedPrecondition
	}
	return codes.Unavailable
}

// refuse answers in the protocol of the request: gRPC has its status in the header, with 200.
func refuse(w http.ResponseWriter, req *http.Request, err error) {
	r, ok := errors.AsType[*refusal](err)
	if !ok {
		r = &refusal{http.StatusBadGateway, err.Error()}
	}
	contentType := req.Header.Get("Content-Type")
	if !strings.HasPrefix(contentType, "application/grpc") {
		http.Error(w, r.message, r.status)
		return
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Grpc-Status", strconv.Itoa(int(r.code())))
	w.Header().Set("Grpc-Message", strings.ReplaceAll(r.message, "%", "%25")) // names are ASCII, or quoted
	w.WriteHeader(http.StatusOK)
}
