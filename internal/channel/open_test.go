package channel

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		payload string
		want    Open
		plain   bool // Append gives the payload again
	}{
		{"\x00\x02$SL/proc/stdio\x00", Open{0, Write, "$SL/proc/stdio"}, false},
		{"\x00\x02$SL/proc/stdio\x00\x00\x00", Open{0, Write, "$SL/proc/stdio"}, false},
		{"\x00\x03$SL/proc/stdio", Open{0, ReadWrite, "$SL/proc/stdio"}, true},
		{"\xff\x0ba/b", Open{255, ReadWrite | QoS2, "a/b"}, true},
		{"\x07\x05a/+/#", Open{7, Read | QoS1, "a/+/#"}, true},
		{"\x01\x81\x02t", Open{0x201, Read, "t"}, true},
	} {
		o, err := ParseOpen([]byte(c.payload))
		require.NoError(t, err, "%q", c.payload)
		assert.Equal(t, c.want, o)
		if c.plain {
			assert.Equal(t, c.payload, string(o.Append(nil)))
		}
	}
	for _, bad := range []string{
		"", "\x00", "\x00\x01", "\x00\x01\x00", "\x00\x00topic", "\x00\x04topic", "\x00\x03a/+", "\x00\x02#",
		"\x00\x01a+", "\x00\x01#/a", "\x00\x01a/#/b", "\x00\x01\xff", "\x00\x01a\x00b", "\x00\x81", "\x00\x01" + strings.Repeat("x", 65536),
	} {
		_, err := ParseOpen([]byte(bad))
		assert.ErrorIs(t, err, errdefs.ErrInvalidArgument, "%.20q", bad)
	}
}

func TestClose(t *testing.T) {
	for payload, want := range map[string]int{"\x05": 5, "\x05\x00": 5, "\xff": 255, "\x01\x02": 0x201} {
		fd, err := ParseClose([]byte(payload))
		require.NoError(t, err)
		assert.Equal(t, want, fd)
	}
	assert.Equal(t, []byte{5}, AppendClose(nil, 5))
	assert.Equal(t, []byte{1, 2}, AppendClose(nil, 0x201))
	for _, bad := range []string{"", "\x00\x00\x00"} {
		_, err := ParseClose([]byte(bad))
		assert.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	}
}

func TestFlags(t *testing.T) {
	for text, want := range map[string]Flags{"r": Read, "w": Write, "rw": ReadWrite, "rw:1": ReadWrite | QoS1, "w:2": Write | QoS2} {
		f, err := ParseFlags(text)
		require.NoError(t, err)
		assert.Equal(t, want, f)
		assert.Equal(t, text, f.String())
	}
	for _, bad := range []string{"", "x", "r:3", ":1", "r:1:1"} {
		_, err := ParseFlags(bad)
		assert.ErrorIs(t, err, errdefs.ErrInvalidArgument, bad)
	}
	assert.EqualValues(t, 2, (QoS1 | QoS2).QoS())
}

func TestCoversTopic(t *testing.T) {
	for _, c := range []struct {
		filter, topic string
		want          bool
	}{
		{"a/b", "a/b", true}, {"a/b", "a", false}, {"a", "a/b", false}, {"#", "a/b/c", true}, {"a/#", "a", true}, {"a/#", "a/b/c", true},
		{"a/#", "ab", false},
		{"+", "a", true}, {"+", "a/b", false}, {"+/+", "a/b", true}, {"+/+", "/", true}, {"/+", "/a", true}, {"+", "/a", false},
		{"a/+", "a/", true}, {"a/+", "a", false},
		{"a/+/c", "a/b/c", true}, {"a/+/c", "a/b/d", false}, {"#", "$SYS/a", false}, {"+/a", "$SYS/a", false}, {"$SYS/#", "$SYS/a", true},
		{"$SYS/+", "$SYS/a", true},
		{"a/#", "a/$b", true}, {"a/+/#", "a", false}, {"a/+/#", "a/b", true},
	} {
		assert.Equal(t, c.want, Covers(c.filter, c.topic), "%s %s", c.filter, c.topic)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte("\x00\x02$SL/proc/stdio\x00"))
	f.Add([]byte("\x01\x81\x02a/#"))
	f.Fuzz(func(t *testing.T, payload []byte) {
		o, err := ParseOpen(payload)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Fatalf("an error without a class: %v", err)
			}
			return
		}
		again, err := ParseOpen(o.Append(nil))
		if err != nil || again != o {
			t.Fatalf("%+v is read again as %+v: %v", o, again, err)
		}
		_, _ = ParseClose(payload)
	})
}
