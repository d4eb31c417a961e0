package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// edgeRecord is the record of a runtime or a module, from the orchestrator or a manager's report. raw is the whole record; the
// other fields are for tables.
type edgeRecord struct {
	raw json.RawMessage

	// origin and problem are for modules that no orchestrator knows: "desired", and why the module cannot be created.
	origin, problem string

	UUID       string          `json:"uuid"`
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Status     string          `json:"status"`
	Parent     json.RawMessage `json:"parent"`
	Runtime    string          `json:"runtime_type"`
	APIs       []string        `json:"apis"`
	MaxModules int             `json:"max_nmodules"`
	Children   json.RawMessage `json:"children"`
	Filename   string          `json:"filename"`
	File       string          `json:"file"`
	Image      string          `json:"image"`
	Exit       json.RawMessage `json:"exit"`
	Since      json.RawMessage `json:"since"`
}

// UnmarshalJSON keeps a copy of the record in raw.
func (r *edgeRecord) UnmarshalJSON(b []byte) error {
	type plain edgeRecord
	if err := json.Unmarshal(b, (*plain)(r)); err != nil {
		return err
	}
	r.raw = bytes.Clone(b)
	return nil
}

// program returns the image or file that the module was made from.
func (r *edgeRecord) program() string {
	return cmp.Or(r.Image, r.File, r.Filename, "-")
}

// parent returns the parent's uuid. Some orchestrators send the parent's record instead of its uuid.
func (r *edgeRecord) parent() string {
	var id string
	if json.Unmarshal(r.Parent, &id) == nil {
		return id
	}
	var record struct {
		UUID string `json:"uuid"`
	}
	_ = json.Unmarshal(r.Parent, &record) // if it is neither, the cell stays empty
	return record.UUID
}

// since returns how long the record has been in its state. Only our orchestrator says it.
func (r *edgeRecord) since() string {
	var at time.Time
	if json.Unmarshal(r.Since, &at) != nil || at.IsZero() {
		return "-"
	}
	return age(at.UnixNano())
}

// edgeStates maps the states of records to words.
var edgeStates = map[string]string{"A": "alive", "Q": "queued", "E": "exiting", "K": "lost", "D": "dead"}

func (r *edgeRecord) state() string {
	return cmp.Or(edgeStates[r.Status], r.Status)
}

// list gets all records of a kind, also dead ones: runtimes, modules or queued.
func (o *edgeOptions) list(ctx context.Context, kind string) ([]edgeRecord, error) {
	var all []edgeRecord
	for {
		var page struct {
			Count   int          `json:"count"`
			Start   int          `json:"start"`
			Results []edgeRecord `json:"results"`
		}
		if err := o.get(ctx, fmt.Sprintf("/api/%s/?dead=1&start=%d", kind, len(all)), &page); err != nil {
			return nil, err
		}
		all = append(all, page.Results...)
		if len(page.Results) == 0 || page.Start != len(all)-len(page.Results) || len(all) >= page.Count {
			return all, nil
		}
	}
}

// find gets one record by its uuid, its name or the end of its uuid. The error is errdefs.ErrNotFound if no record
// matches.
func (o *edgeOptions) find(ctx context.Context, kind, q string) (*edgeRecord, error) {
	r := &edgeRecord{}
	err := o.get(ctx, "/api/"+kind+"/"+url.PathEscape(q)+"/", r)
	if errdefs.IsNotFound(err) {
		return nil, fmt.Errorf("no %s has the uuid or the name %q: %w", strings.TrimSuffix(kind, "s"), q, errdefs.ErrNotFound)
	}
	return r, err
}

func (o *edgeOptions) get(ctx context.Context, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(o.orchestrator, "/")+path, nil)
	if err != nil || request.URL.Host == "" {
		return fmt.Errorf("--orchestrator %q is not http://HOST:PORT: %w", o.orchestrator, errdefs.ErrInvalidArgument)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("no orchestrator answers at %s: start one with `tripod orchestrator` or with edge.orchestrator in a daemon, or name it with --orchestrator (%v): %w", o.orchestrator, err, errdefs.ErrUnavailable)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 64<<20))
	switch {
	case err != nil:
		return fmt.Errorf("read the orchestrator's answer: %w", err)
	case response.StatusCode == http.StatusNotFound:
		return errdefs.ErrNotFound
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("the orchestrator at %s answers %s to GET %s: %s", o.orchestrator, response.Status, path,
			bytes.TrimSpace(body[:min(len(body), 300)]))
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("the server at %s is not an orchestrator: %w", o.orchestrator, err)
	}
	return nil
}

// printRecords prints whole records as JSON or YAML if requested; otherwise it calls printTable.
func (a *App) printRecords(records []edgeRecord, printTable func(wide bool) error) error {
	raw := make([]json.RawMessage, len(records))
	for i := range records {
		raw[i] = records[i].raw
	}
	return a.Print(raw, printTable)
}
