package wasi

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Store keeps the pairs of wasi:keyvalue. Its methods can be called concurrently and wait for the result, at most until
// ctx ends. An error is errdefs.ErrPermissionDenied or has a text for the guest. Values are nil if there is none, and not
// nil if they are empty.
type Store interface {
	// Get returns the values of keys. It calls hold with the size of each value, in bytes, before it reads the value, and
	// returns an error of hold.
	Get(ctx context.Context, hold func(n int) error, keys ...string) ([][]byte, error)
	Set(ctx context.Context, pairs ...Pair) error
	Delete(ctx context.Context, keys ...string) error
	Exists(ctx context.Context, key string) (bool, error)
	// Keys returns some keys, and the cursor for the next call, which is 0 after the last one. It begins at the cursor 0.
	// It calls hold as Get does.
	Keys(ctx context.Context, hold func(n int) error, cursor uint64) (keys []string, next uint64, err error)
	// Increment adds to a decimal number, which is 0 if it is missing, and returns the sum.
	Increment(ctx context.Context, key string, delta int64) (int64, error)
	// Swap sets a value if the key still has the old value, and reports whether it has.
	Swap(ctx context.Context, key string, old, value []byte) (bool, error)
}

// Pair is a key with its value.
type Pair struct {
	Key   string
	Value []byte
}

// Limits of wasi:keyvalue: of a key and a value in bytes, and of the keys in one call of batch.
const (
	maxKey   = 4 << 10
	MaxValue = 4 << 20
	maxBatch = 1000
)

// defaultStore is the identifier of the only store. Toolchains use it, or an empty one, for the host's choice.
const defaultStore = "default"

// bucket is the resource bucket. All buckets of an instance are the same store.
type bucket struct{ store Store }

// cas is the resource cas: a value as it was read.
type cas struct {
	store Store
	key   string
	value []byte // nil if there was none
	state *State
}

func (s *cas) held() int { return len(s.key) + len(s.value) }

// Close is called when the guest drops the handle.
func (s *cas) Close() error {
	s.state.Hold(-s.held())
	return nil
}

// The cases of error.
const (
	errorNoSuchStore = iota
	errorAccessDenied
	errorOther
)

// storeError appends an error of wasi:keyvalue.
func (c *Call) storeError(err error) {
	if errdefs.IsPermissionDenied(err) {
		c.Out = wit.AppendCase(c.Out, errorAccessDenied)
		return
	}
	c.Out = wit.AppendString(wit.AppendCase(c.Out, errorOther), err.Error())
}

var (
	errKeySize   = fmt.Errorf("the key is longer than %d bytes", maxKey)
	errValueSize = fmt.Errorf("the value is larger than %d bytes", MaxValue)
	errBatchSize = fmt.Errorf("the batch has more than %d keys", maxBatch)
	errCursor    = errors.New("the cursor is not valid")
	errNegative  = errors.New("the number is negative or too large")
)

// holding counts memory for values until the end of one call of the guest.
type holding struct {
	*Call
	held int
}

// hold counts n bytes, which exist twice: as a value, and in the result.
func (h *holding) hold(n int) error {
	if !h.Call.Hold(2 * n) {
		return ErrHeld
	}
	h.held += 2 * n
	return nil
}

func (h *holding) release() { h.releaseTo(0) }

// releaseTo makes only the first n bytes count.
func (h *holding) releaseTo(n int) {
	h.Call.Hold(n - h.held)
	h.held = n
}

// onStore makes a function from one that writes its ok result. If do returns an error, the result is that error; only an
// error of the host itself ends the guest's call.
func onStore(do func(c *holding, s Store) error) Func {
	return func(call *Call) error {
		b, err := Get[*bucket](call.State, call.In.U32())
		if err != nil {
			return err
		}
		c := &holding{Call: call}
		defer c.release()
		if err = do(c, b.store); err == nil {
			return nil
		}
		if ended := c.ends(err); ended != nil {
			return ended
		}
		c.Out = c.Out[:0]
		c.Failed()
		c.storeError(err)
		return nil
	}
}

// ends returns the error with which the guest's call ends, or nil if err is for the guest.
func (c *Call) ends(err error) error {
	switch {
	case errors.Is(err, ErrHeld):
		return err
	case c.Err() != nil:
		return context.Cause(c)
	}
	return nil
}

// key reads a key.
func (c *Call) key() (string, error) {
	key := c.In.String()
	if len(key) > maxKey {
		return "", errKeySize
	}
	return key, c.In.Err()
}

// keys reads a list of keys.
func (c *Call) keys() ([]string, error) {
	n := c.In.Len()
	if n > maxBatch {
		return nil, errBatchSize
	}
	keys := make([]string, 0, n)
	for range n {
		key, err := c.key()
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// pair reads a key and its value. The value is valid until the end of the call.
func (c *Call) pair() (Pair, error) {
	key, err := c.key()
	value := c.In.Bytes()
	if err == nil && len(value) > MaxValue {
		err = errValueSize
	}
	return Pair{key, value}, err
}

// pairs reads a list of pairs.
func (c *Call) pairs() ([]Pair, error) {
	n := c.In.Len()
	if n > maxBatch {
		return nil, errBatchSize
	}
	pairs := make([]Pair, 0, n)
	for range n {
		p, err := c.pair()
		if err != nil {
			return nil, err
		}
		pairs = append(pairs, p)
	}
	return pairs, nil
}

// value appends an option<list<u8>>.
func (c *Call) value(v []byte) {
	if c.Out = wit.AppendOption(c.Out, v != nil); v != nil {
		c.Out = wit.AppendBytes(c.Out, v)
	}
}

func openStore(c *Call) error {
	name := c.In.String()
	if c.options.Store == nil || name != "" && name != defaultStore {
		c.FailedWith(errorNoSuchStore)
		return nil
	}
	c.OK()
	c.Own(&bucket{c.options.Store})
	return nil
}

// storeFuncs returns the functions of the interface store. The functions of a draft's cursor read it, and append the next
// one, which is 0 after the last key.
func storeFuncs(read func(c *Call) (uint64, error), appendCursor func(dst []byte, cursor uint64) []byte) map[string]Func {
	return map[string]Func{
		"open": openStore,
		"[method]bucket.get": onStore(func(c *holding, s Store) error {
			key, err := c.key()
			if err != nil {
				return err
			}
			values, err := s.Get(c, c.hold, key)
			if err != nil {
				return err
			}
			c.OK()
			c.value(values[0])
			return nil
		}),
		"[method]bucket.set": onStore(func(c *holding, s Store) error {
			p, err := c.pair()
			return c.done(err, func() error { return s.Set(c, p) })
		}),
		"[method]bucket.delete": onStore(func(c *holding, s Store) error {
			key, err := c.key()
			return c.done(err, func() error { return s.Delete(c, key) })
		}),
		"[method]bucket.exists": onStore(func(c *holding, s Store) error {
			key, err := c.key()
			if err != nil {
				return err
			}
			exists, err := s.Exists(c, key)
			c.OK()
			c.Out = wit.AppendBool(c.Out, exists)
			return err
		}),
		"[method]bucket.list-keys": onStore(func(c *holding, s Store) error {
			cursor := uint64(0)
			if c.In.Option() {
				var err error
				if cursor, err = read(c.Call); err != nil {
					return err
				}
			}
			keys, next, err := s.Keys(c, c.hold, cursor)
			c.OK()
			c.Out = wit.AppendLen(c.Out, len(keys))
			for _, key := range keys {
				c.Out = wit.AppendString(c.Out, key)
			}
			if c.Out = wit.AppendOption(c.Out, next != 0); next != 0 {
				c.Out = appendCursor(c.Out, next)
			}
			return err
		}),
	}
}

// done calls do and writes an ok result without a value, unless err is not nil.
func (h *holding) done(err error, do func() error) error {
	if err == nil {
		err = do()
	}
	h.OK()
	return err
}

// batchFuncs returns the functions of the interface batch. The function appendPair appends an entry of get-many.
func batchFuncs(appendPair func(c *Call, key string, value []byte)) map[string]Func {
	return map[string]Func{
		"get-many": onStore(func(c *holding, s Store) error {
			keys, err := c.keys()
			if err != nil {
				return err
			}
			values, err := s.Get(c, c.hold, keys...)
			if err != nil {
				return err
			}
			c.OK()
			c.Out = wit.AppendLen(c.Out, len(keys))
			for i, key := range keys {
				appendPair(c.Call, key, values[i])
			}
			return nil
		}),
		"set-many": onStore(func(c *holding, s Store) error {
			pairs, err := c.pairs()
			return c.done(err, func() error { return s.Set(c, pairs...) })
		}),
		"delete-many": onStore(func(c *holding, s Store) error {
			keys, err := c.keys()
			return c.done(err, func() error { return s.Delete(c, keys...) })
		}),
	}
}

var (
	storeDraft = storeFuncs(
		func(c *Call) (uint64, error) { return c.In.U64(), nil }, wit.AppendU64)
	storeDraft2 = storeFuncs(
		func(c *Call) (uint64, error) {
			cursor, err := strconv.ParseUint(c.In.String(), 10, 64)
			if err != nil {
				return 0, errCursor
			}
			return cursor, nil
		},
		func(dst []byte, cursor uint64) []byte { return wit.AppendString(dst, strconv.FormatUint(cursor, 10)) })

	batchDraft = batchFuncs(func(c *Call, key string, value []byte) {
		if c.Out = wit.AppendOption(c.Out, value != nil); value != nil {
			c.Out = wit.AppendBytes(wit.AppendString(c.Out, key), value)
		}
	})
	batchDraft2 = batchFuncs(func(c *Call, key string, value []byte) {
		c.Out = wit.AppendString(c.Out, key)
		c.value(value)
	})

	atomicsDraft = map[string]Func{
		"increment": onStore(func(c *holding, s Store) error {
			return c.increment(s, func(sum int64) bool { return sum >= 0 })
		}),
	}
	atomicsDraft2 = map[string]Func{
		"increment": onStore(func(c *holding, s Store) error {
			return c.increment(s, func(int64) bool { return true })
		}),
		"[static]cas.new": onStore(func(c *holding, s Store) error {
			key, err := c.key()
			if err != nil {
				return err
			}
			made, err := c.read(s, key)
			if err == nil {
				c.OK()
				c.Own(made)
			}
			return err
		}),
		"[method]cas.current": func(c *Call) error {
			made, err := Get[*cas](c.State, c.In.U32())
			if err != nil {
				return err
			}
			c.OK()
			c.value(made.value)
			return nil
		},
		"swap": swap,
	}
)

// increment adds a number. A sum that is not valid for the draft is an error, although it is stored. Numbers of both
// drafts are 64 bits.
func (h *holding) increment(s Store, valid func(sum int64) bool) error {
	key, err := h.key()
	delta := int64(h.In.U64())
	if err != nil {
		return err
	}
	if !valid(delta) {
		return errNegative
	}
	sum, err := s.Increment(h, key, delta)
	if err == nil && !valid(sum) {
		err = errNegative
	}
	h.OK()
	h.Out = wit.AppendU64(h.Out, uint64(sum))
	return err
}

// read makes a cas of the current value, which counts until it is dropped.
func (h *holding) read(s Store, key string) (*cas, error) {
	values, err := s.Get(h, h.hold, key)
	if err != nil {
		return nil, err
	}
	made := &cas{store: s, key: key, value: values[0], state: h.State}
	if !h.Call.Hold(made.held()) {
		return nil, ErrHeld
	}
	return made, nil
}

// swap implements swap: func(cas: cas, value: list<u8>) -> result<_, cas-error>.
func swap(call *Call) error {
	was, err := Take[*cas](call.State, call.In.U32())
	if err != nil {
		return err
	}
	defer was.Close()
	c := &holding{Call: call}
	defer c.release()
	value := c.In.Bytes()
	swapped, now := false, (*cas)(nil)
	if len(value) > MaxValue {
		err = errValueSize
	} else {
		swapped, err = was.store.Swap(c, was.key, was.value, value)
	}
	if err == nil && !swapped {
		now, err = c.read(was.store, was.key)
	}
	switch {
	case swapped:
		c.OK()
	case err != nil:
		if ended := c.ends(err); ended != nil {
			return ended
		}
		c.FailedWith(0) // store-error
		c.storeError(err)
	default:
		c.FailedWith(1) // cas-failed
		c.Own(now)
	}
	return nil
}
