// Package metrics shows the node's figures to Prometheus, and hands the spans of requests to an OpenTelemetry collector. Both
// are off unless configured ([metrics] address, [tracing] endpoint).
//
//	node.Pods ─────────────┐
//	CRI calls ─Interceptor─┼─► registry ──► GET /metrics (text, OpenMetrics)
//	collectors ──Register──┘
//	workers' spans ──Tracing.Forward──► bounded queue ──► OTLP over gRPC
//
// What is counted is documented by the endpoint itself (HELP lines). Figures are taken when they are asked for; nothing here
// measures by itself or holds up what it measures: a full queue of spans drops them, and says so in a counter.
//
// The package knows no kind of pod: a kind's figures are a collector of its own, which cmd/tripod registers.
package metrics
