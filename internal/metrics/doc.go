// Package metrics exports the node's metrics to Prometheus, and the spans of requests to an OpenTelemetry collector.
// Both are off by default ([metrics] address, [tracing] endpoint).
//
//	node.Pods ─────────────┐
//	CRI calls ─Interceptor─┼─► registry ──► GET /metrics (text, OpenMetrics)
//	collectors ──Register──┘
//	workers' spans ──Tracing.Forward──► bounded queue ──► OTLP over gRPC
//
// The response of the endpoint documents the metrics (HELP lines). Values are collected only on request. Collecting a
// value never delays what is being measured. When the queue is full, further batches of spans are dropped and counted.
//
// The package knows nothing about backends: each kind of pod has its own collector, which cmd/tripod registers.
package metrics
