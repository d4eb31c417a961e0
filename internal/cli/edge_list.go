package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

func (a *App) edgePs(o *edgeOptions) *cobra.Command {
	var all, quiet bool
	c := &cobra.Command{
		Use: "ps [MODULE...]", Short: "List modules that are alive, queued, exiting or lost (-a: dead ones too)",
		ValidArgsFunction: a.completeEdge(o, "modules"),
		Long: `List modules that are alive, queued, exiting or lost. Those of the orchestrator come from its REST interface, those of desired documents
(docs/edge.md), which no orchestrator knows, from the reports that the managers retain at the broker.`,
		RunE: func(c *cobra.Command, args []string) error {
			modules, err := a.modules(c.Context(), o, args, all)
			if err != nil {
				return err
			}
			if quiet {
				for i := range modules {
					fmt.Fprintln(a.Stdout, modules[i].UUID)
				}
				return nil
			}
			return a.printRecords(modules, func(wide bool) error { return a.modulesTable(modules, wide) })
		},
	}
	c.Flags().BoolVarP(&all, "all", "a", false, "dead modules too, with how they ended")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print only uuids")
	return c
}

func (a *App) modulesTable(modules []edgeRecord, wide bool) error {
	header := []string{"MODULE", "NAME", "STATE", "ORIGIN", "RUNTIME", "PROGRAM", "ENDED"}
	if wide {
		header = append(header, "SINCE", "APIS")
	}
	t := newTable(a.Stdout, header...)
	for i := range modules {
		m := &modules[i]
		row := []string{m.UUID, m.Name, m.state(), cmp.Or(m.origin, "orchestrator"), m.parent(), m.program(), m.ended()}
		if wide {
			row = append(row, m.since(), strings.Join(m.APIs, ","))
		}
		t.row(row...)
	}
	return t.flush()
}

// ended formats how the module ended last, and why it cannot be created. It returns "-" if there is neither.
func (r *edgeRecord) ended() string {
	text := ""
	if len(r.Exit) > 0 && string(r.Exit) != "null" {
		text = exitText(exitStatus(r.Exit))
	}
	switch {
	case r.problem == "" || strings.Contains(text, r.problem):
		return cmp.Or(text, "-")
	case text == "":
		return r.problem
	}
	return text + "; " + r.problem
}

// exitStatus returns the status in a manager's report of an exit.
func exitStatus(exit json.RawMessage) json.RawMessage {
	var report struct {
		Status json.RawMessage `json:"status"`
	}
	_ = json.Unmarshal(exit, &report) // a report without a status leaves the field empty
	return report.Status
}

// exitText formats an exit status, which is an object from our managers, and a string from public peers.
func exitText(status json.RawMessage) string {
	var text string
	if len(status) == 0 || json.Unmarshal(status, &text) == nil {
		return text
	}
	var s struct {
		Code    *int   `json:"code"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
	}
	if json.Unmarshal(status, &s) != nil {
		return string(status)
	}
	words := []string{}
	if s.Reason != "" {
		words = append(words, s.Reason)
	}
	if s.Code != nil {
		words = append(words, "code "+strconv.Itoa(*s.Code))
	}
	if s.Message != "" {
		words = append(words, s.Message)
	}
	return strings.Join(words, ", ")
}

func (a *App) edgeRuntimes(o *edgeOptions) *cobra.Command {
	return &cobra.Command{
		Use: "runtimes", Short: "List the runtimes that modules can run on", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			runtimes, err := o.list(c.Context(), "runtimes")
			if err != nil {
				return err
			}
			modules, err := o.list(c.Context(), "modules")
			if err != nil {
				return err
			}
			used := map[string]int{}
			for i := range modules {
				if s := modules[i].Status; s == "A" || s == "E" {
					used[modules[i].parent()]++
				}
			}
			return a.printRecords(runtimes, func(wide bool) error {
				header := []string{"RUNTIME", "NAME", "STATE", "TYPE", "MODULES", "APIS"}
				if wide {
					header = append(header, "SINCE", "MANAGER")
				}
				t := newTable(a.Stdout, header...)
				for i := range runtimes {
					r := &runtimes[i]
					row := []string{r.UUID, r.Name, r.state(), r.Runtime, fmt.Sprintf("%d/%d", used[r.UUID], r.MaxModules), strings.Join(r.APIs, ",")}
					if wide {
						row = append(row, r.since(), r.parent())
					}
					t.row(row...)
				}
				return t.flush()
			})
		},
	}
}

// completeEdge completes arguments in the shell with modules or runtimes.
func (a *App) completeEdge(o *edgeOptions, kind string) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		records, err := o.list(c.Context(), kind)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var words []string
		for i := range records {
			if r := &records[i]; r.Status != "D" {
				words = append(words, r.UUID+"\t"+r.Name+", "+r.state())
				if r.Name != "" {
					words = append(words, r.Name)
				}
			}
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}
