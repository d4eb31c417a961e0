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

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"
)

// The values of the flag -o.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

// OutputFlag adds the flag -o to a command that prints with Print.
func (a *App) OutputFlag(c *cobra.Command) {
	a.outputFlag(c, c.Flags(), formatTable, formatWide, formatJSON, formatYAML)
}

// outputFlag adds the flag -o with the given formats, of which the first is the default.
func (a *App) outputFlag(c *cobra.Command, flags *pflag.FlagSet, formats ...string) {
	last := len(formats) - 1
	words := strings.Join(formats[:last], ", ") + " or " + formats[last]
	flags.VarP(outputFormat{&a.format, formats}, "output", "o", words)
	// The only error is a flag that does not exist.
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

// outputFormat is the value of the flag -o. A wrong one is an error before the command does anything.
type outputFormat struct {
	value   *string
	formats []string
}

func (f outputFormat) String() string {
	if f.value == nil { // pflag compares defaults with the zero value
		return ""
	}
	return cmp.Or(*f.value, f.formats[0])
}

func (f outputFormat) Type() string { return "string" }

func (f outputFormat) Set(value string) error {
	if !slices.Contains(f.formats, value) {
		return fmt.Errorf("the output format is one of %s: %w", strings.Join(f.formats, ", "), errdefs.ErrInvalidArgument)
	}
	*f.value = value
	return nil
}

// table writes aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = printable(c)
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

// printable replaces control characters. Names come from users and can contain a tab or a line break, which would break a
// table.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
}

func (t *table) flush() error { return t.w.Flush() }

// Print writes the document as JSON or YAML if the user asked for one of these; otherwise it calls printTable. Without
// printTable, JSON is the default.
func (a *App) Print(document any, printTable func(wide bool) error) error {
	if printTable != nil && a.asTable() {
		return printTable(a.format == formatWide)
	}
	return a.printDocument(document, "", func(out *bytes.Buffer, text []byte) error { return json.Indent(out, text, "", "  ") })
}

// printItem writes one document of a stream: a line of JSON, or a YAML document. The caller prints tables.
func (a *App) printItem(document any) error {
	return a.printDocument(document, "---\n", json.Compact)
}

// printDocument writes the document as YAML after a separator, or as JSON in the given layout.
func (a *App) printDocument(document any, separator string, layout func(*bytes.Buffer, []byte) error) error {
	text, err := jsonOf(document)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if a.format == formatYAML {
		text, err = yaml.JSONToYAML(text)
		out.WriteString(separator)
		out.Write(text)
	} else if err = layout(&out, text); err == nil {
		out.WriteByte('\n')
	}
	if err == nil {
		_, err = out.WriteTo(a.Stdout)
	}
	return err
}

// asTable reports whether the user wants a table.
func (a *App) asTable() bool {
	return a.format == "" || a.format == formatTable || a.format == formatWide
}

// asID reports whether the user wants only the ID of what a command made: the narrow format of such a command.
func (a *App) asID() bool { return a.asTable() && a.format != formatWide }

// jsonOf converts a document to JSON.
func jsonOf(document any) ([]byte, error) {
	if msg, ok := document.(proto.Message); ok {
		return protoJSON(msg)
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(document)
	return out.Bytes(), err
}

// protoJSON converts a message to JSON and expands info maps, whose values are JSON in strings.
func protoJSON(msg proto.Message) ([]byte, error) {
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
