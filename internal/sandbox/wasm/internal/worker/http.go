package worker

import (
	"context"
	"net/http"

	"github.com/tripod-run/tripod/internal/component/wasihttp"
)

// serveComponent runs a request in an instance of a wasi:http component.
func (s *server) serveComponent(w http.ResponseWriter, r *http.Request) {
	s.pod.counts.requests.Add(1)
	s.pod.counts.active.Add(1)
	defer s.pod.counts.active.Add(-1)
	err := s.serveInstance(w, r)
	if err == nil {
		return
	}
	s.pod.count(r.Context(), r.Method+" "+r.URL.Path, err)
	wasihttp.Fail(w, err)
}

// serveInstance is a separate function so that the instance is put back before serveComponent calls Fail, which can
// panic.
func (s *server) serveInstance(w http.ResponseWriter, r *http.Request) error {
	limits := *s.limits.Load()
	g, err := s.pool.get(r.Context(), limits)
	if err != nil {
		return err
	}
	defer s.pool.put(g, limits)
	return g.http.Serve(w, r, func(ctx context.Context, params []byte) error {
		_, err := g.Call(ctx, s.pod.code.handle, params, nil)
		return err
	})
}
