package dataplane

import (
	"net/http"
	"slices"
	"strings"

	"github.com/rs/cors"
)

// CORS says which web pages can call a server from a browser; without Origins none can.
type CORS struct {
	// Origins are patterns of package origin.
	Origins []string
	// Credentials allows requests with cookies, HTTP authentication and client certificates.
	Credentials bool
}

// preflightAge is how long a browser can use the answer to a preflight request, in seconds. Chromium keeps it for two
// hours at most.
const preflightAge = 2 * 60 * 60

// corsMethods are the methods that pages can use. gRPC components need GET and POST, wasi:http components can need any.
var corsMethods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
}

// grpcExposed are header fields in which gRPC-Web clients find the status of a call without messages.
var grpcExposed = []string{"Grpc-Message", "Grpc-Status", "Grpc-Status-Details-Bin"}

const (
	allowOrigin      = "Access-Control-Allow-Origin"
	allowCredentials = "Access-Control-Allow-Credentials"
)

// WithCORS answers preflight requests, and lets pages from c.Origins read next's responses with all header fields
// (Fetch standard, "CORS protocol"). It does not change native gRPC, which no page can use: browsers do not let pages
// read trailers. Without Origins it returns next.
func WithCORS(c CORS, next http.Handler) http.Handler {
	if len(c.Origins) == 0 {
		return next
	}
	policy := cors.New(cors.Options{
		AllowedOrigins: c.Origins, AllowCredentials: c.Credentials, AllowPrivateNetwork: true,
		AllowedMethods: corsMethods, AllowedHeaders: []string{"*"}, MaxAge: preflightAge,
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isGRPC(MediaType(r.Header)) {
			next.ServeHTTP(w, r)
			return
		}
		policy.HandlerFunc(w, r)
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			return // policy has answered
		}
		origin, credentials := w.Header()[allowOrigin], w.Header()[allowCredentials]
		exposing := &hookedWriter{ResponseWriter: w, begin: func() { expose(w.Header(), origin, credentials) }}
		next.ServeHTTP(exposing, r)
		exposing.start()
	})
}

// expose completes the header of a response for CORS. Its CORS fields are origin and credentials; a component's own
// ones are removed, because browsers refuse a response with two answers. If origin is not nil, the page can read the
// response, and all fields are listed by name in Access-Control-Expose-Headers: "*" does not cover requests with
// credentials.
func expose(header http.Header, origin, credentials []string) {
	names := slices.Clone(grpcExposed)
	for name := range header {
		switch {
		case strings.HasPrefix(name, "Access-Control-"):
			delete(header, name)
		case name != "Set-Cookie" && !strings.HasPrefix(name, http.TrailerPrefix): // pages cannot read these
			names = append(names, name)
		}
	}
	if !lists(header["Vary"], "Origin") {
		header["Vary"] = append(header["Vary"], "Origin") // the component has replaced the field
	}
	if origin == nil {
		return
	}
	header[allowOrigin] = origin
	if credentials != nil {
		header[allowCredentials] = credentials
	}
	slices.Sort(names)
	header["Access-Control-Expose-Headers"] = []string{strings.Join(slices.Compact(names), ", ")}
}

// lists reports whether a header field, which is a list of case-insensitive names (RFC 9110, 5.6.1), contains name.
func lists(field []string, name string) bool {
	for element := range strings.SplitSeq(strings.Join(field, ","), ",") {
		if strings.EqualFold(strings.TrimSpace(element), name) {
			return true
		}
	}
	return false
}
