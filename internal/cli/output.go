package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"
)

// table writes aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...string) {
	for i, c := range cells {
		// Names come from users and can contain a tab or a line break, which would break the table.
		cells[i] = strings.Map(func(r rune) rune {
			if r < ' ' || r == 0x7f {
				return '?'
			}
			return r
		}, c)
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// print writes msg as JSON or YAML if the user asked for one of these; otherwise it calls printTable.
func (a *App) print(msg proto.Message, printTable func(wide bool) error) error {
	switch a.format {
	case "table", "":
		return printTable(false)
	case "wide":
		return printTable(true)
	case "json", "yaml":
		document, err := jsonOf(msg)
		if err != nil {
			return err
		}
		return a.printJSON(document)
	default:
		return fmt.Errorf("output format %q is not table, wide, json or yaml", a.format)
	}
}

// printJSON writes a document in the requested format, yaml or json.
func (a *App) printJSON(document []byte) error {
	if a.format == "yaml" {
		text, err := yaml.JSONToYAML(document)
		if err == nil {
			_, err = a.Stdout.Write(text)
		}
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, document, "", "  "); err != nil {
		return err
	}
	out.WriteByte('\n')
	_, err := out.WriteTo(a.Stdout)
	return err
}

// jsonOf converts a message to JSON and expands info maps, whose values are JSON in strings.
func jsonOf(msg proto.Message) ([]byte, error) {
	document, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(msg)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(document, &fields); err != nil {
		return nil, err
	}
	var info map[string]string
	if json.Unmarshal(fields["info"], &info) != nil || len(info) == 0 {
		return document, nil
	}
	opened := map[string]any{}
	for k, v := range info {
		opened[k] = v
		if json.Valid([]byte(v)) {
			opened[k] = json.RawMessage(v)
		}
	}
	if fields["info"], err = json.Marshal(opened); err != nil {
		return nil, err
	}
	return marshalOrdered(fields)
}

// marshalOrdered marshals the fields of a status answer with the status first and the long info last.
func marshalOrdered(fields map[string]json.RawMessage) ([]byte, error) {
	var out bytes.Buffer
	names := slices.SortedFunc(maps.Keys(fields), func(a, b string) int {
		return cmp.Or(boolInt(a == "info")-boolInt(b == "info"), boolInt(b == "status")-boolInt(a == "status"), cmp.Compare(a, b))
	})
	for i, name := range names {
		out.WriteByte("{,"[min(i, 1)])
		fmt.Fprintf(&out, "%q:%s", name, fields[name])
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// shortID truncates hexadecimal IDs. It does not change names.
func shortID(id string) string {
	hex := strings.TrimPrefix(id, "sha256:")
	if len(hex) == 64 && strings.Trim(hex, "0123456789abcdef") == "" {
		return hex[:13]
	}
	return id
}

func shortIDs(ids []string) []string {
	short := make([]string, len(ids))
	for i, id := range ids {
		short[i] = shortID(id)
	}
	slices.Sort(short)
	if len(slices.Compact(slices.Clone(short))) < len(ids) {
		return ids
	}
	return short
}

// age formats the time since a CRI timestamp, which is in nanoseconds since 1970.
func age(nanos int64) string {
	if nanos <= 0 {
		return "-"
	}
	return duration.HumanDuration(time.Since(time.Unix(0, nanos))) + " ago"
}

// size formats bytes in powers of ten, as docker and crictl do for images.
func size(bytes uint64) string {
	const units = "kMGTPE"
	if bytes < 1000 {
		return fmt.Sprintf("%dB", bytes)
	}
	v, unit := float64(bytes)/1000, 0
	for v >= 999.95 && unit < len(units)-1 {
		v, unit = v/1000, unit+1
	}
	return fmt.Sprintf("%.3g%cB", v, units[unit])
}

// pairs formats a label map in a fixed order.
func pairs(m map[string]string) string {
	if len(m) == 0 {
		return "-"
	}
	var all []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, k+"="+m[k])
	}
	return strings.Join(all, ",")
}
