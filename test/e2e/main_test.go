package e2e

import (
	"os"
	"testing"

	"github.com/containerd/nri/pkg/api"

	"github.com/tripod-run/tripod/test/harness"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(api.PluginNameEnvVar); name != "" { // started by the daemon under test (TestNRIInstalledPlugins)
		os.Exit(installedPlugin(name))
	}
	harness.Main(m)
}
