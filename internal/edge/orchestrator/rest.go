package orchestrator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/guard"
)

// Handler serves the REST interface, /metrics and /healthz, all read-only.
func (o *Orchestrator) Handler() http.Handler {
	mux := http.NewServeMux()
	for path, h := range map[string]http.HandlerFunc{
		"/api/runtimes":     o.list(Runtime, anyRecord),
		"/api/runtimes/{q}": o.one(Runtime),
		"/api/modules":      o.list(Module, anyRecord),
		"/api/modules/{q}":  o.one(Module),
		"/api/queued":       o.list(Module, func(r *Record) bool { return r.Status == Queued }),
	} {
		mux.HandleFunc("GET "+path, h) // the protocol's paths end in a slash, which some clients omit
		mux.HandleFunc("GET "+path+"/{$}", h)
	}
	mux.HandleFunc("GET /healthz", o.health)
	mux.Handle("GET /metrics", o.metricsHandler())
	mux.HandleFunc("/", notFound)
	return guard.Handler(o.log, "REST", mux)
}

// notFound answers requests that no other pattern matches.
func notFound(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		fail(w, http.StatusMethodNotAllowed, "only GET is served: modules are created and deleted by MQTT")
		return
	}
	fail(w, http.StatusNotFound, fmt.Sprintf("nothing is at %s", r.URL.Path))
}

// list answers with the wanted records of a kind that are not dead, oldest first; with ?dead=1 dead ones, too. It skips the
// first ?start= records, and returns at most ?limit= records. "count" is the total number of those records.
func (o *Orchestrator) list(kind Kind, wanted func(*Record) bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		start, err := page(r, "start", 0)
		limit, limitErr := page(r, "limit", maxRecords)
		if err := errors.Join(err, limitErr); err != nil {
			fail(w, http.StatusBadRequest, describe(err))
			return
		}
		dead := r.URL.Query().Get("dead") == "1"
		found := o.state.where(kind, func(r *Record) bool { return wanted(r) && (dead || r.Status != Dead) })
		from := min(start, len(found))
		results := []byte{'['}
		for i, r := range found[from:min(from+limit, len(found))] {
			if i > 0 {
				results = append(results, ',')
			}
			results = append(results, o.show(r)...)
		}
		answer := wire.ModuleData{"results": append(results, ']')}
		answer.Set("count", len(found))
		answer.Set("start", start)
		reply(w, http.StatusOK, answer.Bytes())
	}
}

// page returns a number of 0 or more from the query, or the given default if the query does not have it.
func page(r *http.Request, name string, otherwise int) (int, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return otherwise, nil
	}
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%s=%q is not a number of 0 or more: %w", name, s, errdefs.ErrInvalidArgument)
	}
	return min(int(n), maxRecords), nil
}

// one answers with a single record. It finds the record by uuid, by name or by a suffix of the uuid.
func (o *Orchestrator) one(kind Kind) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		q := r.PathValue("q")
		found := o.state.find(kind, q)
		if found == nil {
			fail(w, http.StatusNotFound, fmt.Sprintf("no %s has the uuid or name %q, or a uuid with that suffix", kind, q))
			return
		}
		reply(w, http.StatusOK, o.show(found))
	}
}

// show returns a record as JSON. The JSON of a runtime includes the records of its modules, as for public peers, and its
// last keepalive.
func (o *Orchestrator) show(r *Record) json.RawMessage {
	d := r.view()
	if r.Kind != Runtime {
		return d.Bytes()
	}
	children := []json.RawMessage{}
	for _, m := range o.state.where(Module, func(m *Record) bool { return m.Parent == r.UUID && m.Status != Dead }) {
		children = append(children, m.view().Bytes())
	}
	d.Set("children", children)
	if b := o.lastBeat(r.UUID); b.data != nil {
		d.Set("last_keepalive", b.at)
		d["keepalive"] = b.data.Bytes()
	}
	return d.Bytes()
}

// health answers 200 while the broker is connected, otherwise 503.
func (o *Orchestrator) health(w http.ResponseWriter, _ *http.Request) {
	if !o.Connected() {
		fail(w, http.StatusServiceUnavailable, "the broker is not connected")
		return
	}
	reply(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

func fail(w http.ResponseWriter, code int, why string) {
	d := wire.ModuleData{}
	d.Set("error", why)
	d.Set("code", code)
	reply(w, code, d.Bytes())
}

func reply(w http.ResponseWriter, code int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(append(body, '\n')) // fails if the client has disconnected
}

// responseTimeout bounds a call from its header to the last byte of the answer.
const responseTimeout = time.Minute

// Serve serves HTTP on the listener until ctx ends. Calls in progress then have a few seconds to finish.
func (o *Orchestrator) Serve(ctx context.Context, l net.Listener) error {
	limiter := o.config.Connections
	server := limiter.HTTPServer(o.Handler())
	server.ReadTimeout, server.WriteTimeout = limiter.HeaderTimeout, responseTimeout
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(limiter.Listener(l)) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve REST on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := server.Shutdown(grace)
	<-ended
	if err != nil {
		return errors.Join(err, server.Close())
	}
	return nil
}
