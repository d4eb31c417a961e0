package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/cli/check"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/node/store"
)

func diagCommand() *cobra.Command {
	var s settings
	var out string
	c := &cobra.Command{
		Use: "diag", Short: "Collect information for diagnosing a node", Args: cobra.NoArgs,
		Long: `Diag collects the version, the configuration, findings about the host, the record, the pods that the CRI lists, and
the mounts, directories, cgroups and helper processes of the node. It changes nothing, works with or without a running
daemon, and skips what cannot be read. It leaves out the environment variables of containers, which can contain secrets.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			sections := gather(c.Context(), cfg)
			if out == "" {
				return printSections(c.OutOrStdout(), sections)
			}
			if err := writeArchive(out, sections); err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.OutOrStdout(), out)
			return err
		},
	}
	s.flags(c)
	c.Flags().StringVar(&out, "file", "", "write a .tar.gz here instead of text to standard output")
	return c
}

type section struct {
	name string
	text []byte
}

func gather(ctx context.Context, c *config.Config) []section {
	var sections []section
	for _, part := range []struct {
		name string
		get  func(context.Context, *config.Config, io.Writer) error
	}{
		{"version.txt", diagVersion}, {"config.toml", diagConfig}, {"check.txt", diagCheck}, {"record.txt", diagRecord},
		{"cri.json", diagCRI}, {"mounts.txt", diagMounts}, {"directories.txt", diagDirectories}, {"cgroups.txt", diagCgroups},
		{"processes.txt", diagProcesses}, {"journal.txt", diagJournal},
	} {
		var text bytes.Buffer
		if err := part.get(ctx, c, &text); err != nil {
			fmt.Fprintf(&text, "\ncannot be collected: %s\n", cli.Explain(err))
		}
		sections = append(sections, section{part.name, text.Bytes()})
	}
	return sections
}

func printSections(out io.Writer, sections []section) error {
	for _, s := range sections {
		if _, err := fmt.Fprintf(out, "==> %s <==\n%s\n", s.name, bytes.TrimRight(s.text, "\n")); err != nil {
			return err
		}
	}
	return nil
}

func writeArchive(path string, sections []section) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(f)
	archive := tar.NewWriter(zip)
	for _, s := range sections {
		err = archive.WriteHeader(&tar.Header{Name: "tripod-diag/" + s.name, Mode: 0o600, Size: int64(len(s.text)), ModTime: time.Now()})
		if err == nil {
			_, err = archive.Write(s.text)
		}
		if err != nil {
			break
		}
	}
	for _, closer := range []io.Closer{archive, zip, f} {
		if closeErr := closer.Close(); err == nil {
			err = closeErr
		}
	}
	return err
}

func diagVersion(_ context.Context, _ *config.Config, out io.Writer) error {
	release, err := os.ReadFile("/proc/version")
	fmt.Fprintf(out, "tripod %s, %s\n%s%s\n", version, runtime.Version(), release, time.Now().UTC().Format(time.RFC3339))
	return err
}

func diagConfig(_ context.Context, c *config.Config, out io.Writer) error {
	text, err := c.TOML()
	if err == nil {
		_, err = out.Write(text)
	}
	return err
}

func diagCheck(ctx context.Context, c *config.Config, out io.Writer) error {
	findings := check.System(c, checkForwarding(c)).Findings(ctx)
	findings = append(append(findings, checkBackends(ctx, c)...), checkDaemon(ctx, c)...)
	return check.Print(out, findings)
}

// copyTries is the maximum number of attempts to copy the record. If the daemon writes to the record during an attempt,
// the copy can be unusable.
const copyTries = 5

// diagRecord reads a copy of the record, because the daemon holds the lock on the file.
func diagRecord(_ context.Context, c *config.Config, out io.Writer) error {
	dir, err := os.MkdirTemp("", "tripod-diag-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var s *store.Store
	for try := range copyTries {
		if s, err = copyRecord(recordFile(c), filepath.Join(dir, fmt.Sprintf("record-%d.db", try))); err != nil {
			continue
		}
		if err = s.Check(); err == nil || try == copyTries-1 {
			break
		}
		_ = s.Close()
	}
	if s == nil {
		return err
	}
	defer s.Close()
	fmt.Fprintf(out, "%s\nfsck: %s\n", recordFile(c), verdict(err))
	return s.All("pods", func(key string, value []byte) error { return printRecord(out, key, value) })
}

func copyRecord(from, to string) (*store.Store, error) {
	text, err := os.ReadFile(from)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		return nil, err
	}
	return store.Open(to)
}

func printRecord(out io.Writer, key string, value []byte) error {
	var record map[string]any
	if err := json.Unmarshal(value, &record); err != nil {
		_, err = fmt.Fprintf(out, "\n%s: %d bytes, not JSON: %v\n", key, len(value), err)
		return err
	}
	openMessage(record, &runtimeapi.PodSandboxConfig{})
	containers, _ := record["containers"].([]any)
	for _, c := range containers {
		if c, ok := c.(map[string]any); ok {
			openMessage(c, &runtimeapi.ContainerConfig{})
		}
	}
	readable, err := json.MarshalIndent(withoutSecrets(record), "", "  ")
	if err == nil {
		_, err = fmt.Fprintf(out, "\n%s\n%s\n", key, readable)
	}
	return err
}

// openMessage replaces the encoded CRI message in a record with a readable form. It omits a message that it cannot
// decode, because the message could contain secrets.
func openMessage(record map[string]any, message proto.Message) {
	text, _ := record["config"].(string)
	record["config"] = "(not readable)"
	encoded, err := base64.StdEncoding.DecodeString(text)
	if err != nil || proto.Unmarshal(encoded, message) != nil {
		return
	}
	if document, err := protojson.Marshal(message); err == nil {
		var opened any
		if json.Unmarshal(document, &opened) == nil {
			record["config"] = opened
		}
	}
}

func verdict(err error) string {
	if err != nil {
		return err.Error()
	}
	return "intact"
}

// withoutSecrets removes the values of environment variables at any depth, even in JSON that is inside a string.
func withoutSecrets(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if strings.EqualFold(key, "envs") || strings.EqualFold(key, "env") {
				v[key] = "(left out)"
			} else {
				v[key] = withoutSecrets(value)
			}
		}
	case string:
		var inner map[string]any
		if strings.HasPrefix(v, "{") && json.Unmarshal([]byte(v), &inner) == nil {
			return withoutSecrets(inner)
		}
	case []any:
		for i := range v {
			v[i] = withoutSecrets(v[i])
		}
	}
	return v
}

func diagCRI(ctx context.Context, c *config.Config, out io.Writer) error {
	client, err := cli.Connect(ctx, c.GRPC.Socket, 10*time.Second)
	if err != nil {
		return err
	}
	defer client.Close(ctx)
	status, err := client.Status(ctx, true)
	if err != nil {
		return err
	}
	answers := map[string]any{"status": status}
	pods, err := client.ListPodSandbox(ctx, nil)
	if err != nil {
		return err
	}
	var statuses []any
	for _, p := range pods {
		if s, err := client.PodSandboxStatus(ctx, p.GetId(), true); err == nil {
			statuses = append(statuses, s)
		}
	}
	answers["pods"] = statuses
	if answers["containers"], err = client.ListContainers(ctx, nil); err != nil {
		return err
	}
	if answers["images"], err = client.Images.ListImages(ctx, nil); err != nil {
		return err
	}
	encoded, err := json.Marshal(answers)
	if err != nil {
		return err
	}
	var document any
	if err := json.Unmarshal(encoded, &document); err != nil {
		return err
	}
	text, err := json.MarshalIndent(withoutSecrets(document), "", "  ")
	if err == nil {
		_, err = out.Write(text)
	}
	return err
}

// diagMounts lists the mounts in our directories.
func diagMounts(_ context.Context, c *config.Config, out io.Writer) error {
	text, err := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, " "+c.Root+"/") || strings.Contains(line, " "+c.State+"/") {
			fmt.Fprint(out, line)
		}
	}
	return err
}

// diagDirectories lists the content of our directories, without the images' and containers' own files.
func diagDirectories(_ context.Context, c *config.Config, out io.Writer) error {
	for _, top := range []string{c.State, c.Root} {
		err := filepath.WalkDir(top, func(path string, d os.DirEntry, err error) error {
			if err != nil {
				fmt.Fprintf(out, "%s: %v\n", path, err)
				return nil
			}
			fmt.Fprintf(out, "%s %s\n", d.Type(), path)
			deep := strings.Count(strings.TrimPrefix(path, top), "/")
			if d.IsDir() && (deep >= 4 || d.Name() == "rootfs" || path == imageDir(c)) {
				return filepath.SkipDir
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// diagCgroups lists the cgroups of the node with their processes.
func diagCgroups(_ context.Context, c *config.Config, out io.Writer) error {
	parent := strings.Trim(c.Linux.CgroupParent, "/")
	if parent == "" {
		parent = "tripod"
	}
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !strings.Contains(path, parent) {
			return nil // a cgroup may disappear during the walk
		}
		procs, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		_, err = fmt.Fprintf(out, "%s: %s\n", path, strings.Join(strings.Fields(string(procs)), " "))
		return err
	})
}

// helperNames are the names of our processes (comm, which the kernel truncates to 15 bytes).
var helperNames = []string{"tripod", "tripod-wasm", "qemu-system-x86", "conmon", "crun", "runc", "catatonit"}

func diagProcesses(_ context.Context, _ *config.Config, out io.Writer) error {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		name, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil || !slices.Contains(helperNames, strings.TrimSpace(string(name))) {
			continue
		}
		line, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		fmt.Fprintf(out, "%s %s\n", filepath.Base(dir), bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
	}
	return err
}

func diagJournal(ctx context.Context, _ *config.Config, out io.Writer) error {
	path, err := exec.LookPath("journalctl")
	if err != nil {
		_, err = fmt.Fprintln(out, "this host has no journal; the daemon logs to its standard error")
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, path, "--unit=tripod", "--lines=500", "--no-pager", "--output=short-iso")
	c.Stdout, c.Stderr = out, out
	return c.Run()
}
