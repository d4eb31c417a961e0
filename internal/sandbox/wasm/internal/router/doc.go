// Package route takes requests at addresses of the node itself and hands each to a pod that runs the component it is
// for.
//
//	client ──► HTTP/3, HTTP/2, h2c ──► Router ──► least loaded running container ──► its worker's data socket, h2c
//	                                     │
//	                                     ├─ header  component: example.com:foo.Bar@1.2.3
//	                                     ├─ else    :authority of that form, with %40 for the @ (RFC 9113, 8.3.1)
//	                                     └─ else    path /package.Service/Method, when one component serves the service
//
// The component map is the node's; reading it takes no lock. The load of a container is the number of requests that
// this router has under way with it: what clients send to pods' own addresses does not pass here. Messages stream both
// ways as they come, with trailers, and a cancellation is passed on. A request goes to another container only if the
// first could not be reached at all: what has been sent once is never sent again.
//
// The package knows neither the node nor a backend: cmd/tripod gives it the map and the way to a container.
package router
