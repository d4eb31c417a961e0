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
	// procs is how many specs run at once, but for those labelled Serial. They sleep most of the time.
	procs = 12
	// fewest is fewer than the filter chooses: one that chooses next to nothing must not pass.
	fewest = 400
)

// features are those of the specs' label Feature that this node has; docs/conformance.md says what it has not.
var features = []string{
	"ContainerStopSignals", "EnvFiles", "Example", "HostAccess", "InPlacePodVerticalScaling", "PodLevelResources",
	"PodLogsQuerySplitStreams", "RuntimeHandler", "SupplementalGroupsPolicy",
}

// filter is ginkgo's, over the labels of the specs, and skip over their names.
var (
	filter = "(NodeConformance || sig-node) && !DRA && !Disruptive && !Flaky" +
		" && !(Slow && FeatureGate: containsAny InPlacePodLevelResourcesVerticalScaling)" +
		" && Feature: isSubsetOf {" + strings.Join(features, ", ") + "}"
	skip = "NoExecuteTaintManager|Pods should (cap back-off|have their auto-restart back-off)"
)

// output is the directory in which the reports and the log of a run are kept.
func output() string { return filepath.Join(harness.Root(), "build", "e2e-node") }

// TestSpecs runs the specs. One that fails must be on the list of known failures, and one on the list must fail.
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

// run runs ginkgo. That a spec has failed is an error as well.
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

// openLocalRegistry lets the registry that some specs run on the node, at this address, be asked itself: the images of all
// others come from the harness's.
func openLocalRegistry() error {
	r, err := harness.OpenRegistry()
	if err != nil {
		return err
	}
	dir := filepath.Join(r.HostsDir, "localhost:5000")
	return errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte("server = \"http://localhost:5000\"\n"), 0o644))
}

// waitNamespaces waits until those of the specs are gone, for which no spec waits.
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
			return fmt.Errorf("namespaces of specs are not gone: %v", names)
		}
	}
}
