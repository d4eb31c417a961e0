package worker

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// fieldOf is the field of a message that holds a number, if it is there.
func fieldOf(t *testing.T, message []byte, number protowire.Number) (uint64, bool) {
	for len(message) > 0 {
		n, typ, size := protowire.ConsumeTag(message)
		require.NoError(t, protowire.ParseError(size))
		if message = message[size:]; n == number {
			v, size := protowire.ConsumeVarint(message)
			require.NoError(t, protowire.ParseError(size))
			return v, true
		}
		size = protowire.ConsumeFieldValue(n, typ, message)
		require.NoError(t, protowire.ParseError(size))
		message = message[size:]
	}
	return 0, false
}

// TestTimeoutIsTheClients: a guest sees the deadline of its client, and none when the client set none.
func TestTimeoutIsTheClients(t *testing.T) {
	s := newServing(t, "faults-c", examples+"faults-c/faults.proto", workerapi.Limits{})
	inspect := func(ctx context.Context) (time.Duration, bool) {
		c := &oneCall{header: http.Header{}, trailer: http.Header{}}
		require.NoError(t, s.Invoke(ctx, s.methodOf(t, "/faults.v1.Faults/Inspect"), c))
		left, ok := fieldOf(t, c.reply, 5)
		return time.Duration(left), ok
	}
	if left, ok := inspect(t.Context()); ok {
		t.Errorf("a deadline in %v that nobody set", left)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if left, ok := inspect(ctx); !ok || left < 30*time.Minute || left > time.Hour {
		t.Errorf("of an hour the guest sees %v, %v", left, ok)
	}
}
