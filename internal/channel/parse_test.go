package channel

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	got, err := Parse(`[{"name":"in","topic":"a/+/#","flags":5},{"name":"stdout","topic":"b","flags":2}]`)
	require.NoError(t, err)
	require.Equal(t, []Channel{{Name: "in", Topic: "a/+/#", Flags: Read | QoS1},
		{Name: "stdout", Topic: "b", Flags: Write}}, got)
}

func TestParseRefuses(t *testing.T) {
	for words, text := range map[string]string{
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
		_, err := Parse(text)
		require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
		require.ErrorContains(t, err, words)
	}
}
