// The program observe writes what an operator needs to watch a node: the tables in docs/metrics.md, the Grafana dashboard and
// the alert rules in contrib. All names come from the code: names.go finds the daemon's metrics in its source, and package
// stats has those of containers. observe_test.go fails if a file is out of date, or if a query uses a name that does not
// exist.
//
//	go run ./hack/observe    # in the root of the repository
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/stats"
)

func main() {
	files, err := generate(".")
	for name, content := range files {
		if err == nil {
			err = os.MkdirAll(filepath.Dir(name), 0o755)
		}
		if err == nil {
			err = os.WriteFile(name, content, 0o644)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "observe:", err)
		os.Exit(1)
	}
}

const document = "docs/metrics.md"

// generate returns the content of all files by their paths. The root is that of the repository.
func generate(root string) (map[string][]byte, error) {
	metrics, err := daemonMetrics(root)
	if err != nil {
		return nil, err
	}
	page, err := os.ReadFile(filepath.Join(root, document))
	if err != nil {
		return nil, err
	}
	for mark, table := range map[string]string{"daemon": daemonTable(metrics), "containers": containerTable()} {
		if page, err = replaceTable(page, mark, table); err != nil {
			return nil, err
		}
	}
	board, err := dashboard()
	if err != nil {
		return nil, err
	}
	rules, err := alertRules()
	if err != nil {
		return nil, err
	}
	return map[string][]byte{document: page, "contrib/grafana/tripod.json": board, "contrib/prometheus/tripod.rules.yaml": rules}, nil
}

// replaceTable replaces the lines between <!-- begin MARK --> and <!-- end MARK -->.
func replaceTable(page []byte, mark, table string) ([]byte, error) {
	begin, end := []byte("<!-- begin "+mark+" -->\n"), []byte("<!-- end "+mark+" -->\n")
	head, rest, ok := bytes.Cut(page, begin)
	_, tail, closed := bytes.Cut(rest, end)
	if !ok || !closed {
		return nil, fmt.Errorf("%s has no lines %q and %q", document, begin, end)
	}
	return slices.Concat(head, begin, []byte(table), end, tail), nil
}

func daemonTable(metrics []metric) string {
	var b strings.Builder
	b.WriteString("\n| metric | labels | meaning |\n|---|---|---|\n")
	for _, m := range metrics {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", m.name, strings.Join(m.labels, ", "), m.help)
	}
	return b.String() + "\n"
}

func containerTable() string {
	var b strings.Builder
	b.WriteString("\n| metric | type | further labels | meaning |\n|---|---|---|---|\n")
	for _, f := range stats.Families {
		kind := strings.ToLower(runtimeapi.MetricType_name[int32(f.Type)])
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Name, kind, strings.Join(f.Labels, ", "), f.Help)
	}
	return b.String() + "\n"
}
