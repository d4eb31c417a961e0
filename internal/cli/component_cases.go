package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
	"sigs.k8s.io/yaml"

	"github.com/tripod-run/tripod/internal/cli/call"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/standalone"
)

const (
	// defaultCaseTime bounds a case that sets no timeout. The call has this deadline, too.
	defaultCaseTime = 10 * time.Second
	// maxGuestOutput bounds what is shown of the component's output, in bytes.
	maxGuestOutput = 8 << 10
)

// componentTest is `tripod component test`.
type componentTest struct {
	app *App
	description
	cases, pattern string
	timeout        time.Duration
	profile        bool
}

// suite is the content of a file with test cases.
type suite struct {
	Env   map[string]string `json:"env"`
	Cases []*componentCase  `json:"cases"`
}

// componentCase is one call and what it must return.
type componentCase struct {
	Name      string            `json:"name"`
	Method    string            `json:"method"`
	Metadata  map[string]string `json:"metadata"`
	Timeout   string            `json:"timeout"`
	Requests  []json.RawMessage `json:"requests"`
	Responses []json.RawMessage `json:"responses"`
	// Code is the expected status, in the spelling of google.rpc.Code. Message is compared if it is set.
	Code    codes.Code `json:"code"`
	Message *string    `json:"message"`
	// Header and Trailer are expected metadata. Other keys are ignored.
	Header  map[string]string `json:"header"`
	Trailer map[string]string `json:"trailer"`

	timeout  time.Duration
	method   protoreflect.MethodDescriptor
	requests []proto.Message
	replies  []proto.Message
}

// caseResult is the outcome of a case.
type caseResult struct {
	Name    string  `json:"name"`
	Method  string  `json:"method"`
	Passed  bool    `json:"passed"`
	Failure string  `json:"failure,omitempty"`
	Seconds float64 `json:"seconds"`
}

// suiteResult is the outcome of all cases.
type suiteResult struct {
	Cases    []caseResult   `json:"cases"`
	Passed   int            `json:"passed"`
	Failed   int            `json:"failed"`
	Warnings []string       `json:"warnings,omitempty"`
	Profiles []*caseProfile `json:"profiles,omitempty"`
	// Output is the end of what the component has printed.
	Output string `json:"output,omitempty"`
}

// command runs the cases and prints the result. If a case fails, the exit code is 1.
func (t *componentTest) command(ctx context.Context, component string) error {
	result, err := t.run(ctx, component)
	if err != nil {
		return err
	}
	if err := t.app.Print(result, func(bool) error { return t.print(result) }); err != nil {
		return err
	}
	if result.Failed > 0 {
		return &ExitError{Code: 1}
	}
	return nil
}

func (t *componentTest) print(result *suiteResult) error {
	out := t.app.Stdout
	for _, w := range result.Warnings {
		fmt.Fprintln(t.app.Stderr, "tripod component test: warning:", w)
	}
	for _, r := range result.Cases {
		if r.Passed {
			fmt.Fprintf(out, "ok    %s (%.3fs)\n", printable(r.Name), r.Seconds)
			continue
		}
		fmt.Fprintf(out, "FAIL  %s (%.3fs)\n      %s\n", printable(r.Name), r.Seconds, strings.ReplaceAll(r.Failure, "\n", "\n      "))
	}
	if result.Failed > 0 && result.Output != "" {
		fmt.Fprintln(out, "The component's output:")
		for line := range strings.Lines(result.Output) {
			fmt.Fprintln(out, "     ", printable(strings.TrimSuffix(line, "\n")))
		}
	}
	for _, p := range result.Profiles {
		if err := p.print(out); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(out, "%d passed, %d failed\n", result.Passed, result.Failed)
	return err
}

func (t *componentTest) run(ctx context.Context, component string) (*suiteResult, error) {
	file, err := t.casesFile(component)
	if err != nil {
		return nil, err
	}
	s, err := readSuite(file, t.pattern)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	spec, built, err := (&push{app: t.app, description: t.description, names: t.profile}).load(ctx, component)
	if errors.Is(err, errDisk) {
		return nil, fmt.Errorf("%s: %w: %w", component, err, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return nil, err
	}
	if len(built.Services) == 0 {
		return nil, fmt.Errorf("%s is no gRPC component, or its services are unknown (--proto); other components have no test cases: %w",
			component, errdefs.ErrInvalidArgument)
	}
	if err := s.resolve(spec.Descriptors, built.Services); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	guest := standalone.Guest{Name: baseName(component), Wasm: spec.Wasm, Descriptors: spec.Descriptors, Services: built.Services}
	for key, v := range s.Env {
		guest.Env = append(guest.Env, key+"="+v)
	}
	slices.Sort(guest.Env)
	result, err := t.runSuite(ctx, s, guest)
	if err != nil {
		return nil, err
	}
	result.Warnings = built.Warnings
	return result, nil
}

// baseName returns a name for a component in a file or directory.
func baseName(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	return filepath.Base(path)
}

// readSuite reads the cases whose names match the pattern.
func readSuite(file, pattern string) (*suite, error) {
	selected, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("--run: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var s suite
	if err := yaml.UnmarshalStrict(text, &s); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if len(s.Cases) == 0 {
		return nil, fmt.Errorf("the file has no cases: %w", errdefs.ErrInvalidArgument)
	}
	for i, c := range s.Cases {
		if c == nil || c.Name == "" || c.Method == "" {
			return nil, fmt.Errorf("cases[%d]: name or method is missing: %w", i, errdefs.ErrInvalidArgument)
		}
	}
	s.Cases = slices.DeleteFunc(s.Cases, func(c *componentCase) bool { return !selected.MatchString(c.Name) })
	if len(s.Cases) == 0 {
		return nil, fmt.Errorf("--run %s matches no case: %w", pattern, errdefs.ErrNotFound)
	}
	return &s, nil
}

// resolve finds the cases' methods and parses their messages. It returns all mistakes.
func (s *suite) resolve(descriptors []byte, services []string) error {
	_, described, err := protowit.ParseServices(descriptors, services...)
	if err != nil {
		return err
	}
	methods := map[string]protoreflect.MethodDescriptor{}
	for _, sd := range described {
		for i := range sd.Methods().Len() {
			m := sd.Methods().Get(i)
			methods[fmt.Sprintf("%s/%s", sd.FullName(), m.Name())] = m
		}
	}
	var mistakes []error
	for _, c := range s.Cases {
		if err := c.resolve(methods); err != nil {
			mistakes = append(mistakes, fmt.Errorf("%s: %w", c.Name, err))
		}
	}
	return errors.Join(mistakes...)
}

func (c *componentCase) resolve(methods map[string]protoreflect.MethodDescriptor) (err error) {
	if c.timeout, err = time.ParseDuration(cmp.Or(c.Timeout, defaultCaseTime.String())); err != nil || c.timeout <= 0 {
		return fmt.Errorf("timeout %q is not a duration such as 2s: %w", c.Timeout, errdefs.ErrInvalidArgument)
	}
	c.method = methods[strings.TrimPrefix(c.Method, "/")]
	if c.method == nil {
		return fmt.Errorf("the component has no method %s (PACKAGE.SERVICE/METHOD): %w", c.Method, errdefs.ErrNotFound)
	}
	var texts []string
	for _, r := range c.Requests {
		texts = append(texts, string(r))
	}
	if c.requests, err = call.Requests(c.method, texts); err != nil {
		return fmt.Errorf("requests: %w", err)
	}
	for _, r := range c.Responses {
		reply := dynamicpb.NewMessage(c.method.Output())
		if err := protojson.Unmarshal(r, reply); err != nil {
			return fmt.Errorf("responses: %s is not a %s: %w: %w", r, c.method.Output().FullName(), err, errdefs.ErrInvalidArgument)
		}
		c.replies = append(c.replies, reply)
	}
	return nil
}

// runSuite runs cases, one after the other.
func (t *componentTest) runSuite(ctx context.Context, s *suite, guest standalone.Guest) (_ *suiteResult, err error) {
	c := config.Default()
	worker, err := standalone.Start(ctx, standalone.Config{
		Program: c.Wasm.Program, UID: c.Wasm.User, GID: c.Wasm.User, MaxMemory: c.Wasm.MaxMemory,
		Holdings: standalone.Holdings{Files: c.Wasm.MaxFiles, Handles: c.Wasm.MaxHandles, HostBytes: c.Wasm.MaxHostBytes,
			Sockets: c.Wasm.MaxSockets},
		CompileTimeout: time.Duration(c.Wasm.CompileTimeout), CompileMemory: c.Wasm.CompileMemory,
		QuickCode: c.Wasm.QuickCode && !t.profile, // the optimised code is what is measured
	}, guest)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, worker.Close()) }()
	client, err := call.Dial(worker.Address.String(), call.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }() // nothing is left to report
	result := &suiteResult{}
	for _, c := range s.Cases {
		begin := time.Now()
		failure := c.run(ctx, client)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s: %w", c.Name, context.Cause(ctx))
		}
		r := caseResult{Name: c.Name, Method: c.Method, Passed: failure == nil, Seconds: time.Since(begin).Seconds()}
		if failure != nil {
			r.Failure = failure.Error()
			result.Failed++
		} else {
			result.Passed++
		}
		result.Cases = append(result.Cases, r)
	}
	output, err := worker.Output(maxGuestOutput)
	result.Output = string(output)
	for n, c := range s.Cases {
		if !t.profile || !result.Cases[n].Passed || err != nil {
			continue
		}
		var p *caseProfile
		if p, err = c.profile(ctx, worker, client); err == nil {
			result.Profiles = append(result.Profiles, p)
		}
	}
	return result, err
}

// unexpectedReply ends a call that has sent a reply that the case does not expect.
type unexpectedReply struct{ error }

// run makes the call and returns how it differs from what is expected.
func (c *componentCase) run(ctx context.Context, client call.Client) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	n := 0
	md, err := call.Exchange(ctx, client, c.method, c.Metadata, c.requests, func(got proto.Message) error {
		if n == len(c.replies) {
			return unexpectedReply{fmt.Errorf("response %d: got %s, want none", n+1, asJSON(got))}
		}
		if want := c.replies[n]; !proto.Equal(got, want) {
			return unexpectedReply{fmt.Errorf("response %d: got %s, want %s", n+1, asJSON(got), asJSON(want))}
		}
		n++
		return nil
	})
	if unexpected, ok := errors.AsType[unexpectedReply](err); ok {
		return unexpected
	}
	failures := []error{c.compareStatus(status.Convert(err))}
	if n < len(c.replies) {
		failures = append(failures, fmt.Errorf("responses: got %d, want %d", n, len(c.replies)))
	}
	return errors.Join(append(failures, compareMetadata("header", md.Header, c.Header), compareMetadata("trailer", md.Trailer, c.Trailer))...)
}

func (c *componentCase) compareStatus(got *status.Status) error {
	if got.Code() != c.Code {
		return fmt.Errorf("status: got %s (%q), want %s", got.Code(), got.Message(), c.Code)
	}
	if c.Message != nil && got.Message() != *c.Message {
		return fmt.Errorf("status message: got %q, want %q", got.Message(), *c.Message)
	}
	return nil
}

func compareMetadata(what string, got metadata.MD, want map[string]string) error {
	var failures []error
	for key, v := range want {
		if values := got.Get(key); !slices.Equal(values, []string{v}) {
			failures = append(failures, fmt.Errorf("%s %s: got %q, want %q", what, key, values, v))
		}
	}
	slices.SortFunc(failures, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(failures...)
}

// asJSON returns a message as JSON on one line.
func asJSON(m proto.Message) string {
	text, err := protojson.Marshal(m)
	if err != nil {
		return err.Error()
	}
	var compact bytes.Buffer // protojson adds random spaces
	if err := json.Compact(&compact, text); err != nil {
		return string(text)
	}
	return compact.String()
}
