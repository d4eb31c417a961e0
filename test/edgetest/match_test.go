package edgetest_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tripod-run/tripod/test/edgetest"
)

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		filter, topic string
		want          bool
	}{
		{"a/b", "a/b", true}, {"a/b", "a", false}, {"a", "a/b", false}, {"#", "a/b/c", true}, {"a/#", "a", true}, {"a/#", "a/b/c", true}, {"a/#", "ab", false},
		{"+", "a", true}, {"+", "a/b", false}, {"+/+", "a/b", true}, {"+/+", "/", true}, {"/+", "/a", true}, {"+", "/a", false}, {"a/+", "a/", true}, {"a/+", "a", false},
		{"a/+/c", "a/b/c", true}, {"a/+/c", "a/b/d", false}, {"#", "$SYS/a", false}, {"+/a", "$SYS/a", false}, {"$SYS/#", "$SYS/a", true}, {"$SYS/+", "$SYS/a", true},
		{"a/#", "a/$b", true}, {"a/+/#", "a", false}, {"a/+/#", "a/b", true},
	} {
		assert.Equal(t, c.want, edgetest.Match(c.filter, c.topic), "%s %s", c.filter, c.topic)
	}
}
