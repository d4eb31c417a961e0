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

// fieldOf returns the varint field with the given number, and whether the message has the field.
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

// TestTimeoutIsTheClients checks that a guest sees its client's deadline, and no deadline if the client set none.
func TestTimeoutIsTheClients(t *testing.T) {
	s := newServing(t, "faults-c", examples+"faults-c/faults.proto", workerapi.Limits{})
	inspect := func(ctx context.Context) (time.Duration, bool) {
		c := &oneCall{header: http.Header{}, trailer: http.Header{}}
		require.NoError(t, s.Invoke(ctx, s.methodOf(t, "/faults.v1.Faults/Inspect"), c))
		left, ok := fieldOf(t, c.reply, 5)
		return time.Duration(left), ok
	}
	if left, ok := inspect(t.Context()); ok {
		t.Errorf("the guest sees a deadline in %v, but the client set none", left)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if left, ok := inspect(ctx); !ok || left < 30*time.Minute || left > time.Hour {
		t.Errorf("timeout the guest sees = %v, %v; the client set an hour", left, ok)
	}
}
