package wasi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// memory is a Store with two keys in each page of Keys.
type memory struct {
	order  []string
	values map[string][]byte
	fail   error
}

func (m *memory) Get(_ context.Context, hold func(n int) error, keys ...string) ([][]byte, error) {
	values := make([][]byte, len(keys))
	for i, key := range keys {
		if err := hold(len(m.values[key])); err != nil {
			return nil, err
		}
		values[i] = m.values[key]
	}
	return values, m.fail
}

func (m *memory) Set(_ context.Context, pairs ...Pair) error {
	for _, p := range pairs {
		if m.values[p.Key] == nil {
			m.order = append(m.order, p.Key)
		}
		m.values[p.Key] = append([]byte{}, p.Value...)
	}
	return m.fail
}

func (m *memory) Delete(_ context.Context, keys ...string) error {
	for _, key := range keys {
		delete(m.values, key)
	}
	return m.fail
}

func (m *memory) Exists(_ context.Context, key string) (bool, error) {
	return m.values[key] != nil, m.fail
}

func (m *memory) Keys(_ context.Context, _ func(n int) error, cursor uint64) ([]string, uint64, error) {
	if end := cursor + 2; end < uint64(len(m.order)) {
		return m.order[cursor:end], end, m.fail
	}
	return m.order[min(cursor, uint64(len(m.order))):], 0, m.fail
}

func (m *memory) Increment(_ context.Context, key string, delta int64) (int64, error) {
	n := int64(len(m.values[key])) + delta // a number is as many bytes
	if n >= 0 {
		m.values[key] = bytes.Repeat([]byte{'x'}, int(n))
	}
	return n, m.fail
}

func (m *memory) Swap(_ context.Context, key string, old, value []byte) (bool, error) {
	now := m.values[key]
	if (now == nil) != (old == nil) || !bytes.Equal(now, old) {
		return false, m.fail
	}
	m.values[key] = append([]byte{}, value...)
	return true, m.fail
}

// keyvalue is a guest with a bucket of one draft.
type keyvalue struct {
	*guest
	draft  string
	bucket uint32
}

func newKeyvalue(t *testing.T, draft string, o Options) *keyvalue {
	k := &keyvalue{guest: newGuest(t, o), draft: draft}
	k.bucket = ok(t, k.kv("store", "open", str(defaultStore))).U32()
	return k
}

func (k *keyvalue) kv(iface, name string, params ...[]byte) *wit.Reader {
	k.t.Helper()
	return k.call("wasi:keyvalue/"+iface+"@"+k.draft, name, params...)
}

// of calls a function of the bucket.
func (k *keyvalue) of(iface, name string, params ...[]byte) *wit.Reader {
	k.t.Helper()
	if iface == "store" {
		name = "[method]bucket." + name
	}
	return k.kv(iface, name, append([][]byte{u32(k.bucket)}, params...)...)
}

func option(r *wit.Reader) string {
	if !r.Option() {
		return "none"
	}
	return r.String()
}

// lists encodes a list of lists of strings, without the lengths of the inner lists.
func lists(rows ...[]string) []byte {
	b := wit.AppendLen(nil, len(rows))
	for _, row := range rows {
		for _, s := range row {
			b = wit.AppendString(b, s)
		}
	}
	return b
}

func TestKeyvalue(t *testing.T) {
	for _, draft := range []string{"0.2.0-draft", "0.2.0-draft2"} {
		k := newKeyvalue(t, draft, Options{Store: &memory{values: map[string][]byte{}}})
		for _, key := range []string{"../a", "b\x00", ""} {
			ok(t, k.of("store", "set", str(key), list([]byte("v"+key))))
			if got := option(ok(t, k.of("store", "get", str(key)))); got != "v"+key {
				t.Errorf("%s: get(%q) = %q", draft, key, got)
			}
		}
		if got := option(ok(t, k.of("store", "get", str("missing")))); got != "none" {
			t.Errorf("%s: get of a missing key = %q", draft, got)
		}
		first, second := none, some(u64(2))
		if draft == "0.2.0-draft2" {
			second = some(str("2"))
		}
		r := ok(t, k.of("store", "list-keys", first))
		if n, a, b := r.Len(), r.String(), r.String(); n != 2 || a != "../a" || b != "b\x00" || !r.Option() {
			t.Errorf("%s: list-keys = %d, %q, %q", draft, n, a, b)
		}
		r = ok(t, k.of("store", "list-keys", second))
		if n, a := r.Len(), r.String(); n != 1 || a != "" || r.Option() {
			t.Errorf("%s: list-keys = %d, %q and a cursor after the last key", draft, n, a)
		}
		ok(t, k.of("store", "delete", str("")))
		if ok(t, k.of("store", "exists", str(""))).Bool() {
			t.Errorf("%s: exists after delete", draft)
		}
		if sum := ok(t, k.of("atomics", "increment", str("n"), u64(7))).U64(); sum != 7 {
			t.Errorf("%s: increment = %d", draft, sum)
		}
		ok(t, k.of("batch", "set-many", lists([]string{"x", "1"}, []string{"y", ""})))
		r = ok(t, k.of("batch", "get-many", lists([]string{"x"}, []string{"missing"}, []string{"y"})))
		var got []string
		for range r.Len() {
			switch {
			case draft == "0.2.0-draft2":
				got = append(got, r.String(), option(r))
			case r.Option():
				got = append(got, r.String(), r.String())
			default:
				got = append(got, "missing", "none")
			}
		}
		if text := fmt.Sprintf("%q", got); text != `["x" "1" "missing" "none" "y" ""]` {
			t.Errorf("%s: get-many = %s", draft, text)
		}
		ok(t, k.of("batch", "delete-many", lists([]string{"x"}, []string{"y"})))
		if ok(t, k.of("store", "exists", str("x"))).Bool() {
			t.Errorf("%s: exists after delete-many", draft)
		}
	}
}

func TestCompareAndSwap(t *testing.T) {
	q := &share{most: 10_000}
	k := newKeyvalue(t, "0.2.0-draft2", Options{Store: &memory{values: map[string][]byte{}}, Bytes: q})
	handle := func() uint32 { return ok(t, k.of("atomics", "[static]cas.new", str("key"))).U32() }
	current := func(cas uint32) string { return option(ok(t, k.kv("atomics", "[method]cas.current", u32(cas)))) }
	first, second := handle(), handle()
	if got := current(first); got != "none" {
		t.Errorf("current = %q, want none", got)
	}
	ok(t, k.kv("atomics", "swap", u32(first), list([]byte("1"))))
	r := k.kv("atomics", "swap", u32(second), list([]byte("2")))
	failed(t, r, 1)
	third := r.U32()
	if got := current(third); got != "1" {
		t.Errorf("current = %q after the value has changed, want 1", got)
	}
	ok(t, k.kv("atomics", "swap", u32(third), list([]byte("3"))))
	k.Drop(handle())
	if q.used != 0 {
		t.Errorf("%d bytes are held without handles", q.used)
	}
	ok(t, k.of("store", "set", str("key"), list(make([]byte, 1000))))
	var err error
	for err == nil {
		_, err = k.try("wasi:keyvalue/atomics@0.2.0-draft2", "[static]cas.new", u32(k.bucket), str("key"))
	}
	if !errors.Is(err, ErrHeld) {
		t.Errorf("handles without end: %v", err)
	}
}

// TestHostileKeyvalue: what a guest passes is bounded, and errors of the store have their cases.
func TestHostileKeyvalue(t *testing.T) {
	m := &memory{values: map[string][]byte{}}
	for _, draft := range []string{"0.2.0-draft", "0.2.0-draft2"} {
		m.fail = nil
		k := newKeyvalue(t, draft, Options{Store: m})
		other := func(what string, r *wit.Reader, want error) {
			t.Helper()
			failed(t, r, errorOther)
			if got := r.String(); got != want.Error() {
				t.Errorf("%s: %s: %q, want %v", draft, what, got, want)
			}
		}
		long := strings.Repeat("k", maxKey+1)
		other("a long key", k.of("store", "get", str(long)), errKeySize)
		other("a long key", k.of("store", "set", str(long), list(nil)), errKeySize)
		other("a large value", k.of("store", "set", str("k"), list(make([]byte, MaxValue+1))), errValueSize)
		var keys [][]string
		for range maxBatch + 1 {
			keys = append(keys, []string{"k"})
		}
		other("a large batch", k.of("batch", "get-many", lists(keys...)), errBatchSize)
		other("a large batch", k.of("batch", "delete-many", lists(keys...)), errBatchSize)
		for i := range keys {
			keys[i] = []string{"k", "v"}
		}
		other("a large batch", k.of("batch", "set-many", lists(keys...)), errBatchSize)
		if draft == "0.2.0-draft" {
			other("a large number", k.of("atomics", "increment", str("n"), u64(1<<63)), errNegative)
		} else {
			other("a wrong cursor", k.of("store", "list-keys", some(str("x"))), errCursor)
		}
		m.fail = errors.New("the disk is full")
		other("an error of the store", k.of("store", "set", str("k"), list(nil)), m.fail)
		m.fail = fmt.Errorf("no: %w", errdefs.ErrPermissionDenied)
		failed(t, k.of("store", "get", str("k")), errorAccessDenied)
		failed(t, k.kv("store", "open", str("others")), errorNoSuchStore)

		ended, cancel := context.WithCancel(t.Context())
		cancel()
		k.ctx = ended
		if _, err := k.try("wasi:keyvalue/store@"+draft, "[method]bucket.get", u32(k.bucket), str("k")); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: a call at the end of the request: %v", draft, err)
		}
	}
	g := newGuest(t, Options{})
	failed(t, g.call("wasi:keyvalue/store@0.2.0-draft2", "open", str("")), errorNoSuchStore)
	q := &share{most: 1000}
	k := newKeyvalue(t, "0.2.0-draft2", Options{Store: m, Bytes: q})
	m.values["large"] = make([]byte, 1000)
	if _, err := k.try("wasi:keyvalue/store@0.2.0-draft2", "[method]bucket.get", u32(k.bucket), str("large")); !errors.Is(err, ErrHeld) {
		t.Errorf("get beyond the limit of host memory: %v", err)
	}
	if q.used != 0 {
		t.Errorf("%d bytes are held after the calls", q.used)
	}
}
