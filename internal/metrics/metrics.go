package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/synced"
)

// Config configures a Metrics.
type Config struct {
	// Version is the program's version.
	Version string
	// Pods lists the node's pods.
	Pods func() []*node.Pod
	// Samples measures the node's pods.
	Samples func(context.Context) []node.PodSamples
	Logger  *slog.Logger
}

// Metrics collects the node's metrics.
type Metrics struct {
	config   Config
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	results  *prometheus.CounterVec
	serving  *http.Server
}

// callBuckets holds the upper bounds of the buckets for the duration of CRI calls, in seconds: from a quick list call
// to a long image pull.
var callBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120}

// New makes a Metrics with the metrics of pods, CRI calls, and the Go process.
func New(c Config) *Metrics {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	m := &Metrics{
		config: c, registry: prometheus.NewRegistry(),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tripod_cri_call_duration_seconds", Help: "Duration of CRI calls, by method.", Buckets: callBuckets,
		}, []string{"method"}),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tripod_cri_calls_total", Help: "Completed CRI calls, by method and gRPC code.",
		}, []string{"method", "code"}),
	}
	build := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tripod_build_info", Help: "1, with the version of the daemon.", ConstLabels: prometheus.Labels{"version": c.Version},
	}, func() float64 { return 1 })
	panics := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "tripod_recovered_panics_total", Help: "Panics in a request or task that the process survived; each is a defect.",
	}, func() float64 { return float64(guard.Total()) })
	synced := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "tripod_synced_writes_total",
		Help: "Writes that waited for the disk: of the node's record, networks' records and the metadata of images.",
	}, func() float64 { return float64(synced.Total()) })
	m.registry.MustRegister(m.calls, m.results, build, panics, synced, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.Register(&pods{list: c.Pods})
	return m
}

// Register adds a collector. It panics if the collector is already registered.
func (m *Metrics) Register(c prometheus.Collector) {
	m.registry.MustRegister(guarded{m.config.Logger, c})
}

// Interceptor counts the calls to a gRPC server and measures how long they take.
func (m *Metrics) Interceptor() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		begin := time.Now()
		resp, err := handler(ctx, req)
		m.count(info.FullMethod, begin, err)
		return resp, err
	}
}

// StreamInterceptor is like Interceptor, for calls that answer with a stream. It counts a call when the stream ends.
func (m *Metrics) StreamInterceptor() grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		begin := time.Now()
		err := handler(srv, stream)
		m.count(info.FullMethod, begin, err)
		return err
	}
}

func (m *Metrics) count(fullMethod string, begin time.Time, err error) {
	method := path.Base(fullMethod)
	m.calls.WithLabelValues(method).Observe(time.Since(begin).Seconds())
	m.results.WithLabelValues(method, status.Code(err).String()).Inc()
}

// Handler serves GET /metrics, with the node's own metrics, and GET /metrics/cadvisor, with those of its containers.
func (m *Metrics) Handler() http.Handler {
	containers := prometheus.NewRegistry()
	containers.MustRegister(guarded{m.config.Logger, &samples{m.config.Samples}})
	options := promhttp.HandlerOpts{EnableOpenMetrics: true, MaxRequestsInFlight: 4, Timeout: 10 * time.Second,
		ErrorHandling: promhttp.ContinueOnError}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, options))
	mux.Handle("GET /metrics/cadvisor", promhttp.HandlerFor(containers, options))
	return guard.Handler(m.config.Logger, "metrics", mux)
}

// guarded recovers a collector's panics, because the registry collects in its own goroutines, where nothing else would
// recover them.
type guarded struct {
	log *slog.Logger
	prometheus.Collector
}

func (g guarded) Collect(to chan<- prometheus.Metric) {
	guard.Func(g.log, "metrics", func() { g.Collector.Collect(to) })()
}

// responseTimeout limits a scrape, from the request's header to the last byte of the response.
const responseTimeout = 30 * time.Second

// Listen serves Handler on a TCP address ("127.0.0.1:9090") until Close is called, within the limits of the limiter.
func (m *Metrics) Listen(ctx context.Context, address string, limiter *connlimit.Limiter) (net.Addr, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w: %w", err, errdefs.ErrUnavailable)
	}
	m.serving = limiter.HTTPServer(m.Handler())
	m.serving.ReadTimeout, m.serving.WriteTimeout = limiter.HeaderTimeout, responseTimeout
	go func() {
		if err := m.serving.Serve(limiter.Listener(l)); !errors.Is(err, http.ErrServerClosed) {
			m.config.Logger.Error("metrics server failed", "err", err)
		}
	}()
	m.config.Logger.Info("serving metrics", "address", l.Addr())
	return l.Addr(), nil
}

// Close stops the server that Listen started, if any.
func (m *Metrics) Close() error {
	if m.serving == nil {
		return nil
	}
	return m.serving.Close()
}
