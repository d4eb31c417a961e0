package e2enode

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

const (
	// procs is the number of specs that run in parallel, except those labelled Serial. Specs sleep most of the time.
	procs = 12
	// minSpecs is the least number of specs that the filter must select.
	minSpecs = 400
)

// features are the values of the specs' label Feature that this node supports; docs/conformance.md lists the others.
var features = []string{
	"ContainerStopSignals", "EnvFiles", "Example", "HostAccess", "InPlacePodVerticalScaling", "PodLevelResources",
	"PodLogsQuerySplitStreams", "RuntimeHandler", "SupplementalGroupsPolicy", "UserNamespacesSupport",
}

// filter is ginkgo's filter for the labels of the specs, and skip is a pattern for the names of specs to skip.
var (
	filter = "(NodeConformance || sig-node) && !DRA && !Disruptive && !Flaky" +
		" && !(Slow && FeatureGate: containsAny InPlacePodLevelResourcesVerticalScaling)" +
		" && Feature: isSubsetOf {" + strings.Join(features, ", ") + "}"
	skip = "NoExecuteTaintManager|Pods should (cap back-off|have their auto-restart back-off)"
)

// output returns the directory for the reports and the log of a run.
func output() string { return filepath.Join(harness.Root(), "build", "e2e-node") }

// TestSpecs runs the specs. The specs that fail must be exactly those in the list of known failures.
func TestSpecs(t *testing.T) {
	known, err := readKnown()
	if err != nil {
		t.Fatal(err)
	}
	programs, err := kube.Programs("e2e")
	if err != nil {
		t.Fatal(err)
	}
	c := kube.Shared(t)
	if err := openLocalRegistry(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	runErr := run(c, programs)
	took := time.Since(began).Round(time.Second)
	r, err := readReport()
	if err != nil {
		t.Fatal(errors.Join(err, runErr))
	}
	for _, trouble := range r.compare(known) {
		t.Error(trouble)
	}
	if err := waitNamespaces(c); err != nil {
		t.Error(err)
	}
	fmt.Printf("node specs, %d at once, %v, reports in %s:\n%d passed, %d failed, %d skipped\n",
		procs, took, output(), r.passed, len(r.failed), r.skipped)
}

// run runs ginkgo. It also returns an error if a spec fails.
func run(c *kube.Cluster, programs string) error {
	if err := errors.Join(os.RemoveAll(output()), os.MkdirAll(output(), 0o755)); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(output(), "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	ginkgo := exec.Command(filepath.Join(programs, "ginkgo"),
		fmt.Sprintf("--procs=%d", procs), "--timeout=2h", "--no-color", "--silence-skips", "--label-filter="+filter, "--skip="+skip,
		"--output-dir="+output(), "--json-report=report.json", "--junit-report=junit.xml",
		filepath.Join(programs, "e2e.test"), "--",
		"--provider=skeleton", "--kubeconfig="+c.Kubeconfig(), "--kubectl-path="+filepath.Join(programs, "kubectl"))
	ginkgo.Stdout, ginkgo.Stderr, ginkgo.Dir = log, log, harness.Dir()
	if err := ginkgo.Run(); err != nil {
		return fmt.Errorf("ginkgo: %w; see %s", err, log.Name())
	}
	return nil
}

// openLocalRegistry makes the daemon pull images of localhost:5000 from the registry that some specs run there. All
// other images come from the harness's registry.
func openLocalRegistry() error {
	r, err := harness.OpenRegistry()
	if err != nil {
		return err
	}
	dir := filepath.Join(r.HostsDir, "localhost:5000")
	return errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte("server = \"http://localhost:5000\"\n"), 0o644))
}

// waitNamespaces waits until the specs' namespaces are deleted, because the specs do not wait themselves.
func waitNamespaces(c *kube.Cluster) error {
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		var list corev1.NamespaceList
		if err := c.Get("/api/v1/namespaces?labelSelector=e2e-run", &list); err != nil {
			return err
		}
		if len(list.Items) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			var names []string
			for _, n := range list.Items {
				names = append(names, n.Name)
			}
			return fmt.Errorf("namespaces of specs after 5 minutes: got %v, want none", names)
		}
	}
}
