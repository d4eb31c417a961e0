// Package router takes requests at addresses of the node itself and forwards each to a pod that runs the component it is
// for. Begin with Router.ServeHTTP.
//
//	client ──► HTTP/3, HTTP/2, h2c ──► Router ──► least loaded running container ──► its worker's data socket, h2c
//	                                     │
//	                                     ├─ header  component: example.com:foo.Bar@1.2.3
//	                                     ├─ or      :authority of that form, with %40 for the @ (RFC 9113, 8.3.1)
//	                                     └─ or      path /package.Service/Method, when one component serves the service
//
// The component map is the node's; reading it takes no lock. The load of a container is the number of requests that this
// router has in flight to it; requests that clients send to a pod's own address do not count. Messages stream both ways
// without delay, with trailers, and cancellations are forwarded. A request goes to a second container only if the first
// could not be reached at all: a request is never sent twice.
//
// The package knows neither the node nor the backend. The backend gives it the map and a dialer.
package router
