package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// originDesired is the origin of modules of a desired document in a manager's report. No orchestrator knows them.
const originDesired = "desired"

// markerWait bounds the wait for this client's own message, which some brokers do not let it publish.
const markerWait = 2 * time.Second

// edgeReport is a manager's retained report about a runtime.
type edgeReport struct {
	UUID    string `json:"uuid"`
	Modules []struct {
		UUID     string          `json:"uuid"`
		Name     string          `json:"name"`
		State    string          `json:"state"`
		Origin   string          `json:"origin"`
		File     string          `json:"file"`
		Image    string          `json:"image"`
		Restarts int             `json:"restarts"`
		Exit     json.RawMessage `json:"exit"`
		Error    string          `json:"error"`
		RetryAt  *time.Time      `json:"retry_at"`
	} `json:"modules"`
}

// reportedStatus maps the states of a manager's report to those of the orchestrator's records. The others have no
// counterpart there, and are shown as they are.
var reportedStatus = map[string]string{"running": "A", "deleting": "E", "exited": "E", "finished": "D"}

// records returns the modules of desired documents.
func (r *edgeReport) records() ([]edgeRecord, error) {
	var all []edgeRecord
	for _, m := range r.Modules {
		if m.Origin != originDesired {
			continue
		}
		fields := map[string]any{"type": "module", "uuid": m.UUID, "name": m.Name, "parent": r.UUID, "origin": m.Origin, "state": m.State,
			"status": cmp.Or(reportedStatus[m.State], m.State), "restarts": m.Restarts}
		for name, value := range map[string]string{"file": m.File, "image": m.Image, "error": m.Error} {
			if value != "" {
				fields[name] = value
			}
		}
		if m.Exit != nil {
			fields["exit"] = map[string]any{"status": m.Exit}
		}
		if m.RetryAt != nil {
			fields["retry_at"] = m.RetryAt
		}
		raw, err := json.Marshal(fields)
		if err != nil {
			return nil, err
		}
		record := edgeRecord{origin: originDesired, problem: m.Error}
		if err := json.Unmarshal(raw, &record); err != nil {
			return nil, err
		}
		all = append(all, record)
	}
	return all, nil
}

// desired returns the modules of desired documents from the retained reports of all managers. A message of this client
// marks the end of the reports, because the broker sends retained messages before later ones.
func (o *edgeOptions) desired(ctx context.Context) ([]edgeRecord, error) {
	client, err := o.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer client.close()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	reports, marker := o.topics().Reported("+"), o.topics().RuntimeLog(client.id)
	if err := client.subscribe(ctx, 1, marker, reports); err != nil {
		return nil, err
	}
	if err := client.Publish(ctx, marker, 1, false, []byte("end of the reports")); err != nil {
		return nil, err
	}
	var all []edgeRecord
	limit := time.NewTimer(markerWait)
	defer limit.Stop()
	for {
		select {
		case m := <-client.messages:
			if m.Topic == marker {
				return all, nil
			}
			var report edgeReport
			if !m.Retain || json.Unmarshal(m.Payload, &report) != nil {
				continue // a change after this client has asked, or another peer's message
			}
			records, err := report.records()
			if err != nil {
				return nil, err
			}
			all = append(all, records...)
		case <-limit.C:
			return all, nil
		case <-ctx.Done():
			return nil, fmt.Errorf("the broker %s has not answered within %s: %w", o.broker, o.timeout, errdefs.ErrUnavailable)
		}
	}
}

// modules returns the modules that the arguments name, even dead ones. Without arguments it returns all modules, but
// dead ones only if dead is set. It asks the orchestrator, and the broker for modules of desired documents. If one of them
// does not answer, it says so, and returns the modules of the other.
func (a *App) modules(ctx context.Context, o *edgeOptions, args []string, dead bool) ([]edgeRecord, error) {
	if len(args) > 0 {
		modules := make([]edgeRecord, 0, len(args))
		for _, arg := range args {
			m, err := a.findModule(ctx, o, arg)
			if err != nil {
				return nil, err
			}
			modules = append(modules, *m)
		}
		return modules, nil
	}
	modules, err := o.list(ctx, "modules")
	desired, brokerErr := o.desired(ctx)
	switch {
	case errdefs.IsInvalidArgument(err) || errdefs.IsInvalidArgument(brokerErr) || err != nil && brokerErr != nil:
		return nil, errors.Join(err, brokerErr)
	case err != nil:
		fmt.Fprintf(a.Stderr, "tripod edge: modules of the orchestrator are not listed: %v\n", err)
	case brokerErr != nil:
		fmt.Fprintf(a.Stderr, "tripod edge: modules of desired documents are not listed: %v\n", brokerErr)
	case len(desired) > 0:
		if err := o.markLost(ctx, desired); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(append(modules, desired...), func(r edgeRecord) bool { return !dead && r.Status == "D" }), nil
}

// findModule finds a module by its uuid, its name or the end of its uuid: one of the orchestrator, or else one of a
// desired document.
func (a *App) findModule(ctx context.Context, o *edgeOptions, q string) (*edgeRecord, error) {
	record, err := o.find(ctx, "modules", q)
	if !errdefs.IsNotFound(err) && !errdefs.IsUnavailable(err) {
		return record, err
	}
	desired, brokerErr := o.desired(ctx)
	if brokerErr != nil {
		fmt.Fprintf(a.Stderr, "tripod edge: modules of desired documents are not searched: %v\n", brokerErr)
		return nil, err
	}
	for _, is := range []func(r edgeRecord) bool{
		func(r edgeRecord) bool { return r.UUID == q },
		func(r edgeRecord) bool { return r.Name == q },
		func(r edgeRecord) bool { return strings.HasSuffix(r.UUID, q) },
	} {
		if i := slices.IndexFunc(desired, is); i >= 0 {
			return &desired[i], nil
		}
	}
	return nil, err
}

// markLost marks the modules of dead runtimes as lost: the report of a node that has left stays at the broker.
func (o *edgeOptions) markLost(ctx context.Context, modules []edgeRecord) error {
	runtimes, err := o.list(ctx, "runtimes")
	if err != nil {
		return err
	}
	for i := range modules {
		m := &modules[i]
		if m.Status != "D" && slices.ContainsFunc(runtimes, func(r edgeRecord) bool { return r.UUID == m.parent() && r.Status == "D" }) {
			m.Status = "K"
		}
	}
	return nil
}
