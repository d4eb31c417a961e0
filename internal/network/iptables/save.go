package iptables

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// The names of the tables.
const (
	NAT    = "nat"
	Filter = "filter"
)

// Table is the content of a table.
type Table struct {
	// Policies holds the policies of the built-in chains, ACCEPT or DROP, by chain.
	Policies map[string]string
	// Rules holds the rules of each chain as iptables-save prints them, without "-A CHAIN ". A chain of the table without
	// rules has an entry.
	Rules map[string][]string
	// Unreadable means that nft has added rules that iptables cannot show.
	Unreadable bool
}

// Has reports whether a rule of the chain contains all parts, each of which is a sequence of whole words.
func (t Table) Has(chain string, parts ...string) bool {
	return slices.ContainsFunc(t.Rules[chain], func(rule string) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(" "+rule+" ", " "+part+" ") })
	})
}

// Save returns the tables of a family by name, in one execution. A table that no program has used yet is missing.
func Save(ctx context.Context, family Family) (map[string]Table, error) {
	return save(ctx, family.String()+"-save")
}

// SaveLegacy is Save for the legacy variant, which can have rules beside those of the node's variant. It returns none if
// the kernel or the node lacks that variant.
func SaveLegacy(ctx context.Context, family Family) (map[string]Table, error) {
	if !HasLegacy(family) {
		return nil, nil
	}
	tables, err := save(ctx, family.String()+"-legacy-save")
	if errdefs.IsFailedPrecondition(err) {
		return nil, nil
	}
	return tables, err
}

// HasLegacy reports whether the kernel has tables of the legacy variant.
func HasLegacy(family Family) bool {
	file := "/proc/thread-self/net/ip_tables_names"
	if family == V6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(file)
	return err == nil && len(names) > 0
}

func save(ctx context.Context, program string) (map[string]Table, error) {
	output, err := run(ctx, program, "")
	if err != nil {
		return nil, err
	}
	return parse(output), nil
}

func parse(output string) map[string]Table {
	tables := map[string]Table{}
	var now Table
	for line := range strings.Lines(output) {
		line = strings.TrimSuffix(line, "\n")
		if name, ok := strings.CutPrefix(line, "# Table `"); ok {
			name, _, _ = strings.Cut(name, "'")
			tables[name] = Table{Unreadable: true}
			continue
		}
		if name, ok := strings.CutPrefix(line, "*"); ok {
			now = Table{Policies: map[string]string{}, Rules: map[string][]string{}}
			tables[name] = now
			continue
		}
		if rule, ok := strings.CutPrefix(line, "-A "); ok {
			chain, rest, _ := strings.Cut(rule, " ")
			now.Rules[chain] = append(now.Rules[chain], rest)
			continue
		}
		if fields := strings.Fields(line); len(fields) > 1 && strings.HasPrefix(line, ":") {
			chain := fields[0][1:]
			now.Rules[chain] = nil
			if fields[1] != "-" {
				now.Policies[chain] = fields[1]
			}
		}
	}
	return tables
}
