package dataplane

import "net/http"

// hookedWriter calls begin once, before the header of the response is sent. begin can still change the header.
type hookedWriter struct {
	http.ResponseWriter
	begin func()
	begun bool
}

// start calls begin, unless it was called before. Call it also after the handler has returned, because the header of a
// response without a body is sent then.
func (w *hookedWriter) start() {
	if !w.begun {
		w.begun = true
		w.begin()
	}
}

// Unwrap lets http.ResponseController use the wrapped writer.
func (w *hookedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *hookedWriter) WriteHeader(status int) {
	if status >= http.StatusOK { // not informational
		w.start()
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *hookedWriter) Write(b []byte) (int, error) {
	w.start()
	return w.ResponseWriter.Write(b)
}

// Flush implements http.Flusher.
func (w *hookedWriter) Flush() {
	w.start()
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}
