package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// edgeModule holds the flags of `edge run`.
type edgeModule struct {
	uuid, name, runtime string
	channels, env, dirs []string
	restart             string
	apis                []string
	detach, upload      bool
	image               string // made from the file by --upload
}

func (a *App) edgeRun(o *edgeOptions) *cobra.Command {
	var m edgeModule
	c := &cobra.Command{
		Use: "run FILE|IMAGE [-- ARGUMENT...]", Short: "Create a module from a file on the node or an image, and wait until it runs",
		Long: `Run asks the orchestrator to create a module and waits until the module runs (or has ended successfully). If it does not
run, the error says why. Run prints the module's uuid. While no runtime is registered with the orchestrator, for example when
it has just started, run waits for one. --timeout limits each of these waits.

FILE is a path on the module's node, below one of that node's edge.module_roots; the file is not sent. A path that does not
begin with / is relative to the current directory. An argument that neither is a file here nor looks like a path is an image:
an OCI reference with a digest.

With --upload, FILE is any file of this machine. Run imports it through the socket of the node on this machine, as an image,
and creates the module on that node. With several runtimes of the type tripod/wasm, --runtime says which is that node's.

A channel is NAME=TOPIC[:MODE[:QOS]]: the module opens it as the file /ch/NAME. The names stdin, stdout and stderr connect its
standard streams. MODE is r, w or rw, QOS is 0, 1 or 2. A topic that begins with $SL/ belongs to the module alone.`,
		Example: `  tripod edge run --upload ticker.wasm --channel out=app/tick:w
  tripod edge run /var/lib/tripod-modules/upper.wasm --channel in=app/in:r --channel out=app/out:w:1
  tripod edge run --runtime wasm --restart always registry.example/relay@sha256:... -- -v`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if dash := c.ArgsLenAtDash(); dash < 0 && len(args) != 1 || dash >= 0 && dash != 1 {
				return fmt.Errorf("needs one file or image and, after --, its arguments: %w", errdefs.ErrInvalidArgument)
			}
			data, err := m.data(args)
			if err == nil && m.upload { // only after the flags have been found valid
				if m.image, m.runtime, err = a.uploadModule(c.Context(), o, args[0], m.runtime); err == nil {
					data, err = m.data(args)
				}
			}
			if err != nil {
				return err
			}
			return a.runModule(c.Context(), o, data, m.detach)
		},
	}
	f := c.Flags()
	f.StringVarP(&m.runtime, "runtime", "r", "", "runtime by uuid or name; empty: the orchestrator chooses")
	f.StringVar(&m.name, "name", "", "name of the module; default: from the file or image")
	f.StringVar(&m.uuid, "uuid", "", "uuid of the module; default: a new one")
	f.StringArrayVar(&m.channels, "channel", nil, "channel NAME=TOPIC[:MODE[:QOS]]")
	f.StringArrayVarP(&m.env, "env", "e", nil, "environment NAME=VALUE")
	f.StringArrayVar(&m.dirs, "dir", nil, "directory of the node to share with the module, below one of the node's edge.dir_roots")
	f.StringVar(&m.restart, "restart", wire.RestartNever, "restart the module when it ends: always, on-failure or never")
	f.StringSliceVar(&m.apis, "api", nil, "API that the runtime must offer, if the orchestrator chooses it")
	f.BoolVar(&m.upload, "upload", false,
		"FILE is a file of this machine: import it as an image of this machine's node, and run the module there")
	a.endpointFlag(c)
	f.BoolVarP(&m.detach, "detach", "d", false, "do not wait until it runs")
	_ = c.RegisterFlagCompletionFunc("runtime", a.completeEdge(o, "runtimes"))
	_ = c.RegisterFlagCompletionFunc("restart",
		cobra.FixedCompletions([]string{wire.RestartAlways, wire.RestartOnFailure, wire.RestartNever}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

// data returns the data of the create message.
func (m edgeModule) data(args []string) (wire.ModuleData, error) {
	name := cmp.Or(m.name, nameOf(strings.TrimSuffix(filepath.Base(args[0]), ".wasm")))
	fields := map[string]any{
		"type": "module", "uuid": cmp.Or(m.uuid, uuid.NewString()), "name": name, "restart": m.restart,
		"args": append([]string{name}, args[1:]...),
	}
	if m.image != "" {
		fields["image"] = m.image
	} else if isModuleFile(args[0]) {
		absolute, err := filepath.Abs(args[0])
		if err != nil {
			return nil, err
		}
		fields["filename"], fields["filetype"] = absolute, "WA"
	} else {
		fields["image"] = args[0]
	}
	if _, err := parseEnv(m.env); err != nil {
		return nil, err
	}
	channels, err := parseChannels(m.channels)
	if err != nil {
		return nil, err
	}
	if m.runtime != "" {
		fields["parent"] = m.runtime
	}
	for name, list := range map[string][]string{"env": m.env, "dirs": m.dirs, "apis": m.apis} {
		if len(list) > 0 {
			fields[name] = list
		}
	}
	fields["channels"] = channels
	raw, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	data, err := wire.ParseModuleData(raw)
	if err != nil {
		return nil, err
	}
	return data, data.Validate()
}

// isModuleFile reports whether arg looks like a path or is an existing file.
func isModuleFile(arg string) bool {
	if strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "./") || strings.HasPrefix(arg, "../") || strings.HasSuffix(arg, ".wasm") {
		return true
	}
	info, err := os.Stat(arg)
	return err == nil && info.Mode().IsRegular()
}

// channelField is a channel in the create message.
type channelField struct {
	Name  string `json:"name"`
	Topic string `json:"topic"`
	Mode  string `json:"mode"`
}

// parseChannels parses NAME=TOPIC[:MODE[:QOS]]. A topic can contain colons; only a suffix that is a valid mode counts
// as one.
func parseChannels(list []string) ([]channelField, error) {
	all := make([]channelField, 0, len(list))
	for _, text := range list {
		name, topic, ok := strings.Cut(text, "=")
		if !ok || name == "" || topic == "" || strings.Contains(name, "/") {
			return nil, fmt.Errorf("--channel %q is not NAME=TOPIC[:MODE[:QOS]]: %w", text, errdefs.ErrInvalidArgument)
		}
		if slices.ContainsFunc(all, func(c channelField) bool { return c.Name == name }) {
			return nil, fmt.Errorf("--channel %q: channel %s is set twice: %w", text, name, errdefs.ErrInvalidArgument)
		}
		topic, mode := cutMode(topic)
		if mode == "" {
			mode = "rw"
			if channel.HasWildcard(topic) {
				mode = "r"
			}
		}
		flags, err := channel.ParseFlags(mode)
		if err == nil {
			err = channel.Open{Flags: flags, Topic: topic}.Validate()
		}
		if err != nil {
			return nil, fmt.Errorf("--channel %q: %w", text, err)
		}
		all = append(all, channelField{Name: name, Topic: topic, Mode: flags.String()})
	}
	return all, nil
}

// cutMode cuts a mode, and its quality of service if present, off the end of the text.
func cutMode(text string) (topic, mode string) {
	rest, last, ok := cutLast(text)
	if !ok {
		return text, ""
	}
	if _, err := channel.ParseFlags(last); err == nil {
		return rest, last
	}
	before, previous, ok := cutLast(rest)
	if _, err := channel.ParseFlags(previous); ok && err == nil {
		return before, previous + ":" + last
	}
	return text, ""
}

func cutLast(text string) (before, after string, ok bool) {
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		return text, "", false
	}
	return text[:i], text[i+1:], true
}

// runModule asks the orchestrator to create the module and, unless detach is set, waits until the module runs or has
// failed.
func (a *App) runModule(ctx context.Context, o *edgeOptions, data wire.ModuleData, detach bool) error {
	client, err := o.connect(ctx)
	if err != nil {
		return err
	}
	defer client.close()
	if err := a.awaitRuntime(ctx, o, data.Parent()); err != nil {
		return err
	}
	topics := o.topics()
	if err := client.subscribe(ctx, 2, topics.Errors(), topics.ControlOf("+"), topics.Reported("+")); err != nil {
		return err
	}
	object, err := client.request(ctx, topics, wire.ActionCreate, data.Bytes())
	if err != nil {
		return err
	}
	if !detach {
		watch := newModuleWatch(topics, object, data.UUID())
		watch.file = data.File()
		if err := o.awaitModule(ctx, client, watch); err != nil {
			return err
		}
	}
	return a.Print(json.RawMessage(data.Bytes()), func(bool) error {
		_, err := fmt.Fprintln(a.Stdout, data.UUID())
		return err
	})
}

// restPatience is the time after which the REST interface counts as not answering.
const restPatience = 5 * time.Second

// awaitRuntime waits until the runtime with the given uuid or name is alive, or any runtime if wanted is empty: an
// orchestrator that has just started refuses modules until runtimes have registered with it. If the orchestrator's REST
// interface does not answer, awaitRuntime returns at once, because the broker is enough to create a module.
func (a *App) awaitRuntime(ctx context.Context, o *edgeOptions, wanted string) error {
	waiting, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	tick := time.NewTicker(statePoll)
	defer tick.Stop()
	announced := ""
	for {
		asking, stop := context.WithTimeout(waiting, restPatience)
		runtimes, err := o.list(asking, "runtimes")
		stop()
		missing := missingRuntime(runtimes, wanted)
		if waiting.Err() == nil && (err != nil || missing == "") {
			return nil
		}
		if missing != announced && waiting.Err() == nil {
			fmt.Fprintf(a.Stderr, "tripod edge run: waiting up to %s for %s to register with the orchestrator\n", o.timeout, missing)
			announced = missing
		}
		select {
		case <-tick.C:
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("%s has not registered with the orchestrator within %s: does the node's daemon run, with [edge] enabled and with this broker and realm? %w",
				cmp.Or(announced, "a runtime"), o.timeout, errdefs.ErrUnavailable)
		}
	}
}

// missingRuntime describes the runtime that a module has to wait for; "" if the orchestrator can decide now. A wanted
// runtime that has never registered is waited for only while no other is alive. Otherwise the name is probably wrong.
func missingRuntime(runtimes []edgeRecord, wanted string) string {
	known, alive := false, false
	for _, r := range runtimes {
		is := wanted == "" || r.UUID == wanted || r.Name == wanted
		if is && r.Status == "A" {
			return ""
		}
		known, alive = known || is, alive || r.Status == "A"
	}
	switch {
	case wanted == "":
		return "a runtime"
	case alive && !known:
		return ""
	}
	return fmt.Sprintf("the runtime %q", wanted)
}

// statePoll is the interval between two requests to the orchestrator about a module. These requests are necessary
// because some managers do not report.
const statePoll = 250 * time.Millisecond

// awaitModule waits until the module runs or has failed.
func (o *edgeOptions) awaitModule(ctx context.Context, client *edgeClient, w *moduleWatch) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	tick := time.NewTicker(statePoll)
	defer tick.Stop()
	record, known := &edgeRecord{}, false
	for {
		select {
		case m := <-client.messages:
			if done, err := w.handle(m); done {
				return err
			}
		case <-tick.C:
			r, err := o.find(ctx, "modules", w.module)
			if err == nil {
				record, known = r, true
			}
			if err == nil && r.Status == "A" && !w.reporting[r.parent()] {
				return nil // the manager does not report, so the orchestrator's record must suffice
			}
			if err == nil && r.Status == "D" {
				return w.exitError(exitStatus(r.Exit))
			}
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			return w.timeoutError(o, record, known)
		}
	}
}

// moduleWatch interprets the messages about one module.
type moduleWatch struct {
	topics         wire.Topics
	object, module string
	file           string          // the module's path on its node, or ""
	reporting      map[string]bool // runtimes whose manager reports
}

func newModuleWatch(topics wire.Topics, object, module string) *moduleWatch {
	return &moduleWatch{topics: topics, object: object, module: module, reporting: map[string]bool{}}
}

// handle interprets a message. done is true if the module runs, has ended or was refused. The error is nil unless the
// module was refused or has failed.
func (w *moduleWatch) handle(m mqtt.Message) (done bool, err error) {
	if m.Topic == w.topics.Errors() {
		return w.handleError(m.Payload)
	}
	if rt := wire.Cut(m.Topic, w.topics.Reported("+")[:len(w.topics.Reported("+"))-len("/+")]); len(rt) == 1 {
		w.reporting[rt[0]] = true
		return reportedRunning(m.Payload, w.module), nil
	}
	e, err := wire.ParseEnvelope(m.Payload)
	if err != nil || e.Action != wire.ActionExited {
		return false, nil
	}
	var data struct {
		UUID   string          `json:"uuid"`
		Status json.RawMessage `json:"status"`
	}
	if json.Unmarshal(e.Data, &data) != nil || data.UUID != w.module {
		return false, nil
	}
	return true, w.exitError(data.Status)
}

// handleError interprets an error message from the orchestrator or a manager. It reports whether the error is about our
// request.
func (w *moduleWatch) handleError(payload []byte) (bool, error) {
	e, err := wire.ParseEnvelope(payload)
	if err != nil || e.Action != wire.ActionError {
		return false, nil
	}
	var data struct {
		Desc string          `json:"desc"`
		Data json.RawMessage `json:"data"`
	}
	_ = json.Unmarshal(e.Data, &data) // missing fields stay empty
	var about struct {
		ObjectID string `json:"object_id"`
		UUID     string `json:"uuid"`
	}
	_ = json.Unmarshal(data.Data, &about)
	if e.ObjectID != w.object && about.ObjectID != w.object && about.UUID != w.module {
		return false, nil
	}
	return true, fmt.Errorf("refused: %s%s", data.Desc, w.hint(data.Desc))
}

// exitError returns an error for a module that has ended, unless it has ended successfully.
func (w *moduleWatch) exitError(status json.RawMessage) error {
	var s struct {
		Code   *int   `json:"code"`
		Reason string `json:"reason"`
	}
	if json.Unmarshal(status, &s) == nil && s.Code != nil && *s.Code == 0 {
		return nil
	}
	var text string
	if json.Unmarshal(status, &text) == nil && text == "exited" {
		return nil // a public peer reports every exit like this
	}
	text = exitText(status)
	return fmt.Errorf("module %s has ended: %s%s", w.module, text, w.hint(text))
}

// hint says whose path the module's file is, if a failure is about the file: the user may have meant a file of this
// machine.
func (w *moduleWatch) hint(failure string) string {
	if w.file == "" || !strings.Contains(failure, w.file) {
		return ""
	}
	return "; FILE is a path on the module's node, below one of its edge.module_roots: copy the file there, or send it from here with --upload"
}

// timeoutError returns the error for a module that does not run in time. The record is valid only if known is set.
func (w *moduleWatch) timeoutError(o *edgeOptions, record *edgeRecord, known bool) error {
	what := "the orchestrator has not answered: is it running, with this broker and realm?"
	if known {
		what = fmt.Sprintf("the orchestrator has it as %s on runtime %s; see `tripod edge ps %s`", record.state(), record.parent(), w.module)
	}
	return fmt.Errorf("module %s does not run after %s: %s: %w", w.module, o.timeout, what, errdefs.ErrUnavailable)
}

// reportedRunning reports whether a manager's report lists the module as running.
func reportedRunning(payload []byte, module string) bool {
	var report struct {
		Modules []struct {
			UUID  string `json:"uuid"`
			State string `json:"state"`
		} `json:"modules"`
	}
	if json.Unmarshal(payload, &report) != nil {
		return false
	}
	for _, m := range report.Modules {
		if m.UUID == module && m.State == "running" {
			return true
		}
	}
	return false
}
