package cluster

import (
	"testing"

	"github.com/tripod-run/tripod/test/harness/kube"
)

func TestMain(m *testing.M) { kube.Main(m, 2) }
