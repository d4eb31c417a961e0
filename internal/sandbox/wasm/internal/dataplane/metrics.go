package dataplane

import (
	"cmp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

// Metrics counts requests by method. Counting is lock-free.
type Metrics struct {
	mu      sync.Mutex
	methods map[string]*methodMetrics
}

// NewMetrics returns empty Metrics.
func NewMetrics() *Metrics { return &Metrics{methods: map[string]*methodMetrics{}} }

// MethodStats are the statistics of one method.
type MethodStats struct {
	Procedure string `json:"procedure"`
	InFlight  int64  `json:"inFlight"`
	// Codes counts completed requests by gRPC code (OK, INTERNAL …) or HTTP status (200 …).
	Codes map[string]uint64 `json:"codes"`
	// ReceivedBytes and SentBytes count the bytes of uncompressed messages without framing or, for plain HTTP, of
	// bodies.
	ReceivedBytes uint64    `json:"receivedBytes"`
	SentBytes     uint64    `json:"sentBytes"`
	Latency       Histogram `json:"latency"`
}

// Histogram is a histogram of durations in seconds.
type Histogram struct {
	Bounds []float64 `json:"bounds"` // upper bounds of all buckets but the last, whose bound is +Inf
	Counts []uint64  `json:"counts"` // per bucket, not cumulative; has one more element than Bounds
	Sum    float64   `json:"sum"`    // of all durations
}

// latencyBounds are the upper bounds of the buckets. The lowest is small, because a component can answer within tens of
// microseconds.
var latencyBounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second,
}

// methodMetrics holds one method's counters. The slice codes is indexed by gRPC code or, for plain HTTP, by status
// minus 100.
type methodMetrics struct {
	http           bool
	inFlight       atomic.Int64
	codes          []atomic.Uint64
	received, sent atomic.Uint64
	buckets        [len(latencyBounds) + 1]atomic.Uint64
	nanoseconds    atomic.Uint64
}

const (
	httpProcedure = "HTTP"
	minHTTPStatus = 100
	maxHTTPStatus = 599
)

// method returns the counters of a procedure. It returns nil if the Metrics are nil.
func (m *Metrics) method(procedure string) *methodMetrics {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	mm, ok := m.methods[procedure]
	if !ok {
		n := len(codeNames)
		if procedure == httpProcedure {
			n = maxHTTPStatus - minHTTPStatus + 1
		}
		mm = &methodMetrics{http: procedure == httpProcedure, codes: make([]atomic.Uint64, n)}
		m.methods[procedure] = mm
	}
	return mm
}

// begin counts the start of a request. end counts its completion.
func (m *methodMetrics) begin() {
	if m != nil {
		m.inFlight.Add(1)
	}
}

func (m *methodMetrics) end(code int, took time.Duration) {
	if m == nil {
		return
	}
	m.inFlight.Add(-1)
	if m.http {
		code -= minHTTPStatus
	} else if code >= len(m.codes) { // not defined by gRPC
		code = int(codes.Unknown)
	}
	m.codes[min(max(code, 0), len(m.codes)-1)].Add(1)
	i, _ := slices.BinarySearch(latencyBounds[:], took)
	m.buckets[i].Add(1)
	m.nanoseconds.Add(uint64(took))
}

func (m *methodMetrics) addReceived(n int) {
	if m != nil {
		m.received.Add(uint64(n))
	}
}

func (m *methodMetrics) addSent(n int) {
	if m != nil {
		m.sent.Add(uint64(n))
	}
}

// Snapshot returns the current statistics, sorted by procedure. The procedure of plain HTTP requests is "HTTP".
func (m *Metrics) Snapshot() []MethodStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	stats := make([]MethodStats, 0, len(m.methods))
	for procedure, mm := range m.methods {
		stats = append(stats, mm.snapshot(procedure))
	}
	slices.SortFunc(stats, func(a, b MethodStats) int { return cmp.Compare(a.Procedure, b.Procedure) })
	return stats
}

func (m *methodMetrics) snapshot(procedure string) MethodStats {
	s := MethodStats{
		Procedure:     procedure,
		InFlight:      m.inFlight.Load(),
		Codes:         map[string]uint64{},
		ReceivedBytes: m.received.Load(),
		SentBytes:     m.sent.Load(),
		Latency: Histogram{
			Bounds: make([]float64, len(latencyBounds)),
			Counts: make([]uint64, len(m.buckets)),
			Sum:    time.Duration(m.nanoseconds.Load()).Seconds(),
		},
	}
	for i := range m.codes {
		if n := m.codes[i].Load(); n > 0 && m.http {
			s.Codes[strconv.Itoa(i+minHTTPStatus)] = n
		} else if n > 0 {
			s.Codes[codeNames[i]] = n
		}
	}
	for i, b := range latencyBounds {
		s.Latency.Bounds[i] = b.Seconds()
	}
	for i := range m.buckets {
		s.Latency.Counts[i] = m.buckets[i].Load()
	}
	return s
}
