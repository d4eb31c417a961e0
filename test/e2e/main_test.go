package e2e

import (
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
