package sandbox

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/keys"
)

func TestParseChannels(t *testing.T) {
	got, err := ParseChannels(nil)
	require.NoError(t, err)
	require.Empty(t, got)
	got, err = ParseChannels(map[string]string{keys.EdgeChannels: `[{"name":"in","topic":"a/+/#","flags":5},{"name":"stdout","topic":"b","flags":2}]`})
	require.NoError(t, err)
	require.Equal(t, []channel.Channel{{Name: "in", Topic: "a/+/#", Flags: channel.Read | channel.QoS1},
		{Name: "stdout", Topic: "b", Flags: channel.Write}}, got)
}

func TestParseChannelsRefuses(t *testing.T) {
	for words, annotation := range map[string]string{
		"array of objects":     `{"name":"in"}`,
		"the name is not":      `[{"name":"a/b","topic":"t","flags":1}]`,
		`(".."): the name`:     `[{"name":"..","topic":"t","flags":1}]`,
		"the topic is":         `[{"name":"a","topic":"","flags":1}]`,
		"neither read":         `[{"name":"a","topic":"t","flags":4}]`,
		"unknown bits":         `[{"name":"a","topic":"t","flags":17}]`,
		"cannot unmarshal":     `[{"name":"a","topic":"t","flags":256}]`,
		"a wildcard":           `[{"name":"a","topic":"t/#","flags":3}]`,
		"used twice":           `[{"name":"a","topic":"t","flags":1},{"name":"a","topic":"u","flags":1}]`,
		"can have 256":         "[" + strings.Repeat("{},", 256) + "{}]",
		"unexpected end of JS": `[`,
	} {
		_, err := ParseChannels(map[string]string{keys.EdgeChannels: annotation})
		require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
		require.ErrorContains(t, err, words)
	}
}
