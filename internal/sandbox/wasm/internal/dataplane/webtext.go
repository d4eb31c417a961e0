package dataplane

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"
)

const (
	webContentType     = "application/grpc-web"
	webTextContentType = "application/grpc-web-text"
)

// webText converts a gRPC-Web request from and its response to the text format, which is the binary format in base64
// (grpc/doc/PROTOCOL-WEB.md, "Protocol differences vs gRPC over HTTP2"). The caller must call finish on the writer at
// the end.
func webText(w http.ResponseWriter, r *http.Request, media string) (*webTextWriter, *http.Request) {
	r = r.WithContext(r.Context()) // a copy
	r.Header = r.Header.Clone()
	r.Header["Content-Type"] = []string{webContentType + strings.TrimPrefix(media, webTextContentType)}
	r.ContentLength = -1
	r.Body = &webTextReader{ReadCloser: r.Body}
	text := &webTextWriter{}
	text.hookedWriter = hookedWriter{ResponseWriter: w, begin: text.convertHeader}
	return text, r
}

// webTextReader decodes a body of one or more base64 strings, each of which can end with padding: clients start a new
// string whenever they flush. It ignores line breaks, as base64(1) inserts them.
type webTextReader struct {
	io.ReadCloser
	text    [4 << 10]byte
	pending int    // bytes at the beginning of text that are not decoded yet
	data    []byte // decoded, but not read yet
	err     error
}

func badText(err error) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the body is not valid base64: %w", err))
}

func (r *webTextReader) Read(p []byte) (int, error) {
	for len(r.data) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		n, err := r.ReadCloser.Read(r.text[r.pending:])
		read := r.text[r.pending : r.pending+n]
		r.pending += len(slices.DeleteFunc(read, func(c byte) bool { return c == '\n' || c == '\r' }))
		whole := r.pending &^ 3
		var invalid error
		r.data, invalid = decodeStrings(r.data[:0], r.text[:whole])
		r.pending = copy(r.text[:], r.text[whole:r.pending])
		switch {
		case invalid != nil:
			r.err = badText(invalid)
		case errors.Is(err, io.EOF) && r.pending > 0:
			r.err = badText(errors.New("it ends in the middle of a group of four characters"))
		default:
			r.err = err
		}
	}
	n := copy(p, r.data)
	r.data = r.data[n:]
	return n, nil
}

// decodeStrings appends the content of base64 strings to b. The length of text is a multiple of four.
func decodeStrings(b, text []byte) (_ []byte, err error) {
	for len(text) > 0 && err == nil {
		end := len(text)
		if i := bytes.IndexByte(text, '='); i >= 0 {
			end = i | 3 + 1 // padding ends a string with its group of four
		}
		b, err = base64.StdEncoding.AppendDecode(b, text[:end])
		text = text[end:]
	}
	return b, err
}

// webTextWriter encodes a response. Each flush pads the text, so that the client can decode all of it.
type webTextWriter struct {
	hookedWriter
	rest  []byte // up to two bytes that are not written yet
	out   []byte
	plain bool // the response is not gRPC-Web but an error of HTTP
}

func (w *webTextWriter) convertHeader() {
	header := w.Header()
	rest, ok := strings.CutPrefix(firstValue(header, "Content-Type"), webContentType)
	if !ok {
		w.plain = true
		return
	}
	header["Content-Type"] = []string{webTextContentType + rest}
	header.Del("Content-Length")
}

func (w *webTextWriter) Write(b []byte) (int, error) {
	w.start()
	if w.plain {
		return w.ResponseWriter.Write(b)
	}
	w.rest = append(w.rest, b...)
	whole := len(w.rest) - len(w.rest)%3
	err := w.encode(w.rest[:whole])
	w.rest = append(w.rest[:0], w.rest[whole:]...)
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

func (w *webTextWriter) encode(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	w.out = base64.StdEncoding.AppendEncode(w.out[:0], b)
	_, err := w.ResponseWriter.Write(w.out)
	return err
}

// finish writes what is left, with padding.
func (w *webTextWriter) finish() {
	w.start()
	_ = w.encode(w.rest) // the client is gone if this fails
	w.rest = w.rest[:0]
}

// Flush implements http.Flusher.
func (w *webTextWriter) Flush() {
	w.finish()
	w.hookedWriter.Flush()
}
