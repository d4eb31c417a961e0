package console

import (
	"bytes"
	"testing"
)

// FuzzRecord: decodeRecord refuses damaged records.
func FuzzRecord(f *testing.F) {
	good := record{serial: fileID{1, 2}, offset: 3, log: fileID{4, 5}, logSize: 6}
	f.Add(good.encode())
	f.Add([]byte("TPCONS01"))
	f.Add(record{offset: -1}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := decodeRecord(b)
		if ok && (r.offset < 0 || r.logSize < 0 || !bytes.Equal(r.encode()[:60], b[:60])) {
			t.Errorf("decodeRecord(%x) = %+v", b, r)
		}
		if got, ok := decodeRecord(good.encode()); !ok || got != good {
			t.Errorf("decodeRecord(encode(%+v)) = %+v, %t", good, got, ok)
		}
	})
}
