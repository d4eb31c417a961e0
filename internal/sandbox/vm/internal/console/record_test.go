package console

import (
	"bytes"
	"testing"
)

// FuzzRecord: a state file that is damaged anywhere is none.
func FuzzRecord(f *testing.F) {
	good := record{serial: fileID{1, 2}, offset: 3, log: fileID{4, 5}, logSize: 6}
	f.Add(good.encode())
	f.Add([]byte("TPCONS01"))
	f.Add(record{offset: -1}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := decodeRecord(b)
		if ok && (r.offset < 0 || r.logSize < 0 || !bytes.Equal(r.encode()[:60], b[:60])) {
			t.Errorf("%x is %+v", b, r)
		}
		if again, ok := decodeRecord(good.encode()); !ok || again != good {
			t.Errorf("%+v, %t", again, ok)
		}
	})
}
