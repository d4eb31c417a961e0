package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tripod-run/tripod/internal/stats"
)

const root = "../.."

func TestUpToDate(t *testing.T) {
	files, err := generate(root)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if got, err := os.ReadFile(filepath.Join(root, name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is out of date (error %v): run `go run ./hack/observe`", name, err)
		}
	}
}

// TestEveryMetricIsFound: no metric of the source escapes daemonMetrics, and each has a help text.
func TestEveryMetricIsFound(t *testing.T) {
	metrics, err := daemonMetrics(root)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, m := range metrics {
		known[m.name] = true
		if m.help == "" {
			t.Errorf("%s has no help text", m.name)
		}
	}
	literal := regexp.MustCompile(`"(` + prefix + `[a-z0-9_]+)"(\+|[^a-z0-9_])`)
	n := 0
	for _, top := range []string{"internal", "cmd"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range literal.FindAllSubmatch(text, -1) {
				n++
				name := string(m[1])
				below := slices.ContainsFunc(metrics, func(m metric) bool { return strings.HasPrefix(m.name, name) })
				if isPrefix := strings.HasSuffix(name, "_") && below; !known[name] && !isPrefix {
					t.Errorf("%s: the metric %s is declared in a form that names.go does not know", path, name)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n < 20 {
		t.Errorf("names found: got %d, want at least 20", n)
	}
}

var (
	metricName = regexp.MustCompile(`\b(tripod|container)_[a-z0-9_]+\b`)
	// Labels in a selector, in a list of labels, in a legend and in a summary.
	selector    = regexp.MustCompile(`([a-z_]+)=?[=~!]~?"`)
	grouping    = regexp.MustCompile(`\bby \(([a-z_, ]+)\)`)
	inLegend    = regexp.MustCompile(`\{\{([a-z_]+)\}\}`)
	inSummary   = regexp.MustCompile(`\$labels\.([a-z_]+)`)
	scrapeLabel = []string{"job", "instance", "le"}
)

// queryChecker knows the labels of each metric.
type queryChecker struct {
	*testing.T
	labels map[string][]string
}

// check checks that the metrics in a query exist, and that they have the labels in the query and in the text beside it.
func (c queryChecker) check(where, query, text string) {
	c.Helper()
	allowed := slices.Clone(scrapeLabel)
	names := metricName.FindAllString(query, -1)
	for _, name := range names {
		labels, ok := c.labels[strings.TrimSuffix(name, "_bucket")]
		if !ok {
			c.Errorf("%s: no metric is named %s", where, name)
		}
		allowed = append(allowed, labels...)
	}
	if len(names) == 0 && !strings.Contains(query, "up{") && !strings.Contains(query, "process_") {
		c.Errorf("%s: the query %s names no metric", where, query)
	}
	var used []string
	for _, m := range selector.FindAllStringSubmatch(query, -1) {
		used = append(used, m[1])
	}
	for _, m := range grouping.FindAllStringSubmatch(query, -1) {
		used = append(used, strings.Split(m[1], ", ")...)
	}
	for _, m := range slices.Concat(inLegend.FindAllStringSubmatch(text, -1), inSummary.FindAllStringSubmatch(text, -1)) {
		used = append(used, m[1])
		if by := grouping.FindStringSubmatch(query); by != nil && !slices.Contains(strings.Split(by[1], ", "), m[1]) {
			c.Errorf("%s: the text has the label %s, which the query aggregates away", where, m[1])
		}
	}
	for _, label := range used {
		if !slices.Contains(allowed, label) {
			c.Errorf("%s: the metrics %v have no label %s", where, names, label)
		}
	}
}

// TestQueries: the queries of the dashboard and the rules use metrics and labels that exist.
func TestQueries(t *testing.T) {
	metrics, err := daemonMetrics(root)
	if err != nil {
		t.Fatal(err)
	}
	c := queryChecker{t, map[string][]string{}}
	for _, m := range metrics {
		c.labels[m.name] = m.labels
	}
	for _, f := range stats.Families {
		c.labels[f.Name] = slices.Concat(stats.BaseLabels, f.Labels)
	}
	for _, r := range rows {
		for _, p := range r.panels {
			for legend, query := range p.queries {
				c.check(p.title, query, legend)
			}
		}
	}
	for _, alerts := range groups {
		for _, a := range alerts {
			c.check(a.name, a.query, a.summary)
		}
	}
}

func TestFormats(t *testing.T) {
	board, err := dashboard()
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct{ Title, Type string }
	}
	if err := json.Unmarshal(board, &d); err != nil || len(d.Panels) < 20 {
		t.Errorf("dashboard: got %d panels, error %v; want at least 20", len(d.Panels), err)
	}
	rules, err := alertRules()
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	if err := yaml.Unmarshal(rules, &r); err != nil || len(r.Groups) != len(groups) {
		t.Errorf("rules: got %d groups, error %v; want %d", len(r.Groups), err, len(groups))
	}
	for _, g := range r.Groups {
		for _, a := range g.Rules {
			if a.Alert == "" || a.Expr == "" {
				t.Errorf("rule without name or query: %+v", a)
			}
		}
	}
}
