package workerapi

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// withFiles is implemented by requests that pass files.
type withFiles interface{ files() []*File }

func (s *PodSpec) files() []*File {
	all := []*File{&s.Log}
	for i := range s.Mounts {
		all = append(all, &s.Mounts[i].Dir)
	}
	for i := range s.Ports {
		all = append(all, &s.Ports[i].Socket)
	}
	if s.Egress != nil {
		all = append(all, &s.Egress.Dialer, &s.Egress.Roots)
	}
	if s.NodeStore != nil {
		all = append(all, &s.NodeStore.Dir)
	}
	return all
}

func (c *Code) files() []*File            { return []*File{&c.Image} }
func (r *fileRequest) files() []*File     { return []*File{&r.File} }
func (r *attachRequest) files() []*File   { return []*File{&r.Conn} }
func (r *channelsRequest) files() []*File { return []*File{&r.Conn} }

// clone returns a copy of the spec, so that pack can set File.Index without changing the caller's spec.
func (s PodSpec) clone() *PodSpec {
	s.Mounts, s.Ports = slices.Clone(s.Mounts), slices.Clone(s.Ports)
	if s.Egress != nil {
		e := *s.Egress
		s.Egress = &e
	}
	if s.NodeStore != nil {
		n := *s.NodeStore
		s.NodeStore = &n
	}
	return &s
}

// CloseFiles closes all files of the spec.
func (s *PodSpec) CloseFiles() {
	for _, f := range s.files() {
		f.Close()
		f.File = nil
	}
}

// pack encodes a request and returns the files to pass with it.
func pack(request any) ([]byte, []*os.File, error) {
	var files []*os.File
	if w, ok := request.(withFiles); ok {
		for _, f := range w.files() {
			f.Index = nil
			if f.File != nil {
				n := len(files)
				f.Index, files = &n, append(files, f.File)
			}
		}
	}
	body, err := json.Marshal(request)
	return body, files, err
}

// unpack decodes a request and moves the frame's files to the request. If a file index is out of range or used twice,
// unpack returns an error and moves no file.
func unpack(body []byte, f *fdpass.Frame, request any) error {
	if err := json.Unmarshal(body, request); err != nil {
		return fmt.Errorf("%w: %w", fdpass.ErrFrame, err)
	}
	w, ok := request.(withFiles)
	if !ok {
		return nil
	}
	seen := make(map[int]bool)
	for _, file := range w.files() {
		file.File = nil
		if i := file.Index; i != nil {
			if *i < 0 || *i >= len(f.Files) || seen[*i] {
				return fmt.Errorf("%w: file %d of a message with %d files is missing or used twice", fdpass.ErrFrame, *i, len(f.Files))
			}
			seen[*i] = true
		}
	}
	for _, file := range w.files() {
		if file.Index != nil {
			file.File, f.Files[*file.Index] = f.Files[*file.Index], nil
		}
	}
	return nil
}
