package workerapi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
)

func TestAttachCarriesAllStreams(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	large := strings.Repeat("x", 5*maxPacket/2)
	go func() {
		s := <-h.session
		defer s.Close()
		var in bytes.Buffer
		for {
			data, err := s.ReadStdin()
			if err != nil {
				_ = s.Write(true, []byte(err.Error()))
				break
			}
			in.Write(data)
		}
		_ = s.Write(false, in.Bytes())
	}()
	var out, stderr bytes.Buffer
	err := c.Attach(t.Context(), "pod", AttachIO{Stdin: strings.NewReader(large), Stdout: &out, Stderr: &stderr})
	require.NoError(t, err)
	require.Equal(t, large, out.String())
	require.Equal(t, "EOF", stderr.String())
}

func TestAttachedClientGoesAway(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	before := openFiles(t)
	for range 100 {
		ctx, cancel := context.WithCancel(t.Context())
		attached := make(chan error, 1)
		go func() { attached <- c.Attach(ctx, "pod", AttachIO{Stdout: io.Discard}) }()
		s := <-h.session
		require.Equal(t, [3]bool{false, true, false}, [3]bool{s.Stdin, s.Stdout, s.Stderr})
		cancel()
		require.ErrorIs(t, <-attached, context.Canceled)
		_, err := s.ReadStdin()
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		s.Close()
	}
	require.Equal(t, before, openFiles(t))
}

func TestAttachRefused(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	before := openFiles(t)
	err := c.Attach(t.Context(), "none", AttachIO{Stdout: io.Discard})
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	require.Equal(t, before, openFiles(t))
}

func TestAttachReportsItsWriter(t *testing.T) {
	h := newHandler()
	_, path := start(t, h)
	c := dial(t, path)
	go func() {
		s := <-h.session
		defer s.Close()
		_ = s.Write(false, []byte("hello"))
		_, _ = s.ReadStdin()
	}()
	full := errors.New("disk full")
	require.ErrorIs(t, c.Attach(t.Context(), "pod", AttachIO{Stdout: failing{full}}), full)
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }
