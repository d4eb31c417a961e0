package tripodgrpc

import (
	"errors"
	_ "unsafe" // for go:linkname
)

// mainMain is the program's main function. A library (-buildmode=c-shared) has no start function that calls it.
//
//go:linkname mainMain main.main
func mainMain()

var (
	started  bool
	ready    = make(chan *Server)
	returned = make(chan struct{})
	current  *Server
)

var errNoServe = errors.New("main returned without a call of tripodgrpc.Serve")

// Serve serves the services. It never returns in a guest, where the host makes the calls. On other platforms, it runs a
// real grpc-go server without TLS on the address HOST:PORT in the environment variable TRIPODGRPC_ADDRESS
// (127.0.0.1:50051 by default), prints the address to the standard error, and returns an error if it cannot listen.
func Serve(s *Server) error {
	s.serving = true
	ready <- s
	select {}
}

// server starts main on first use and waits until main calls Serve.
func server() (*Server, error) {
	if current != nil {
		return current, nil
	}
	if !started {
		started = true
		go func() {
			defer close(returned)
			mainMain()
		}()
	}
	select {
	case current = <-ready:
		return current, nil
	case <-returned:
		return nil, errNoServe
	}
}
