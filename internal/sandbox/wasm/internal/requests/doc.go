// Package requests accepts requests at addresses of the node and forwards each request to a pod that runs the requested
// component. Begin with Router.ServeHTTP.
//
//	client ──► HTTP/3, HTTP/2, h2c ──► Router ──► least loaded running container ──► its worker's data socket, h2c
//	                                     │
//	                                     ├─ header  component: example.com:foo.Bar@1.2.3
//	                                     ├─ or      :authority of that form, with %40 for the @ (RFC 9113, 8.3.1)
//	                                     └─ or      path /package.Service/Method, if only one component serves Service
//
// The node owns the component map, which is read without a lock. The load of a container is the number of requests that
// this router has in flight to the container; requests to a pod's own address do not count. Messages stream in both
// directions without delay. Trailers and cancellations are forwarded. A request goes to a second container only if the
// first one could not be reached: no request is ever sent twice.
//
// The package imports neither the node nor the backend. The backend passes the map and a dialer.
package requests
