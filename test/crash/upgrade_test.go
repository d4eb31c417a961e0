package crash

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// previous is the commit from which the test upgrades. Its records have no ID yet (ADR 25).
const previous = "93d106f"

// ticker returns a container that logs ten lines a second.
func ticker(name string) *runtimeapi.ContainerConfig {
	return harness.ContainerConfig(name, harness.Busybox, harness.Shell("i=0; while sleep 0.1; do i=$((i+1)); echo $i; done"))
}

// wantTicking checks that a container is running and still writes its log.
func wantTicking(t *testing.T, c *harness.Container) {
	t.Helper()
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Fatalf("status of the container: got %v, want running", s)
	}
	lines := len(c.Logs())
	harness.Eventually(t, 20*time.Second, func() error {
		if now := len(c.Logs()); now <= lines {
			return fmt.Errorf("lines in the container's log: got %d, want more than %d", now, lines)
		}
		return nil
	})
}

// TestN9UpgradeWithRunningPods: the pods of an earlier tripod keep running after an upgrade, and this tripod takes
// orders for them. After that, the earlier tripod refuses the record and changes nothing.
func TestN9UpgradeWithRunningPods(t *testing.T) {
	earlier := harness.Earlier(t, previous)
	d := harness.NewDaemon(t, harness.Unset("cdi"), harness.Unset("nri"))
	d.Program(earlier)
	d.Start()
	stops, stays := d.RunPod(t, harness.PodConfig(t, "stops")), d.RunPod(t, harness.PodConfig(t, "stays"))
	a, b := stops.Run(ticker("a")), stays.Run(ticker("b"))
	created := stays.Create(harness.ContainerConfig("created", harness.Busybox, harness.Shell("exit 4")))
	d.Stop()

	d.Program("")
	d.Start()
	wantTicking(t, a)
	wantTicking(t, b)
	b.Must("true")
	created.Start()
	created.WaitExit(4)
	a.Stop(5 * time.Second)
	stops.Remove()
	wantPod(t, d)
	d.Stop()

	d.Program(earlier) // knows only version 1 of pods' records
	if err := d.TryStart(); err == nil || !strings.Contains(d.DaemonLog(), "start the tripod that wrote it") {
		t.Errorf("start of the earlier tripod on a later record: got error %v, want a refusal that names the remedy", err)
	}
	d.Program("")
	d.Start()
	wantTicking(t, b)
	stays.Remove()
}

// editRecord changes the record of a node whose daemon is stopped.
func editRecord(t *testing.T, d *harness.Daemon, change func(tx *bbolt.Tx) error) {
	t.Helper()
	db, err := bbolt.Open(filepath.Join(d.Root, "record.db"), 0o600, &bbolt.Options{Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(change), db.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestN9DowngradeIsRefused: the daemon refuses a record that a later tripod wrote, wholly or for one pod, and leaves
// its pods alone.
func TestN9DowngradeIsRefused(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodConfig(t, "p"))
	c := pod.Run(ticker("c"))
	d.Stop()
	right, err := os.ReadFile(filepath.Join(d.Root, "record.db"))
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(tx *bbolt.Tx) error{
		"the file": func(tx *bbolt.Tx) error {
			return tx.Bucket([]byte("meta")).Put([]byte("format"), binary.BigEndian.AppendUint32(nil, 99))
		},
		"a pod": func(tx *bbolt.Tx) error {
			pods := tx.Bucket([]byte("pods"))
			key, value := pods.Cursor().First()
			var record map[string]json.RawMessage
			if err := json.Unmarshal(value, &record); err != nil {
				return err
			}
			record["version"] = json.RawMessage("99")
			later, err := json.Marshal(record)
			return errors.Join(err, pods.Put(key, later))
		},
	} {
		editRecord(t, d, change)
		before, err := os.ReadFile(filepath.Join(d.Root, "record.db"))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.TryStart(); err == nil {
			t.Fatalf("%s: the daemon started, want a refusal", name)
		}
		if log := d.DaemonLog(); !strings.Contains(log, "99") {
			t.Errorf("%s: the daemon's log does not name version 99", name)
		}
		lines := len(c.Logs())
		harness.Eventually(t, 20*time.Second, func() error {
			if len(c.Logs()) <= lines {
				return errors.New("the container's log has no new line")
			}
			return nil
		})
		if now, err := os.ReadFile(filepath.Join(d.Root, "record.db")); err != nil || name == "the file" && !bytes.Equal(now, before) {
			t.Errorf("%s: the daemon changed the record, error %v", name, err)
		}
		if err := os.WriteFile(filepath.Join(d.Root, "record.db"), right, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d.Start()
	wantTicking(t, c)
	pod.Remove()
}

// TestN10ClockJumped: all times in the record are decades in the future or in the past, as if the clock had been set
// while the daemon was down. The daemon still finds, lists, stops (with the grace period) and removes its pods, and
// creates new pods.
func TestN10ClockJumped(t *testing.T) {
	for name, years := range map[string]int{"back": 30, "forward": -30} { // if the clock goes back, recorded times are in the future
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t)
			pod := d.RunPod(t, harness.PodConfig(t, "p"))
			c := pod.Run(ticker("c"))
			ended := pod.Run(harness.ContainerConfig("ended", harness.Busybox, harness.Shell("exit 5")))
			ended.WaitExit(5)
			d.Stop()
			shift := func(raw []byte) ([]byte, error) {
				var v any
				numbers := json.NewDecoder(bytes.NewReader(raw))
				numbers.UseNumber() // process start times do not fit a float64
				if err := numbers.Decode(&v); err != nil {
					return nil, err
				}
				return json.Marshal(shifted(v, years))
			}
			editRecord(t, d, func(tx *bbolt.Tx) error {
				pods := tx.Bucket([]byte("pods"))
				return pods.ForEach(func(k, v []byte) error {
					moved, err := shift(v)
					return errors.Join(err, pods.Put(k, moved))
				})
			})
			files, err := filepath.Glob(filepath.Join(d.Root, "linux", "*", "*", "state.json"))
			if err != nil || len(files) != 2 {
				t.Fatalf("state files of containers: got %v, error %v; want 2", files, err)
			}
			for _, file := range files {
				raw, err := os.ReadFile(file)
				if err == nil {
					raw, err = shift(raw)
				}
				if err == nil {
					err = os.WriteFile(file, raw, 0o600)
				}
				at := time.Now().AddDate(years, 0, 0)
				if err = errors.Join(err, os.Chtimes(file, at, at)); err != nil {
					t.Fatal(err)
				}
			}
			d.Start()
			wantTicking(t, c)
			if s := ended.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.ExitCode != 5 {
				t.Errorf("status of the exited container: got %v, want exit code 5", s)
			}
			if got, want := time.Unix(0, pod.Status().CreatedAt).Year(), time.Now().AddDate(years, 0, 0).Year(); got < want-1 || got > want+1 {
				t.Errorf("year of the pod's creation: got %d, want %d", got, want)
			}
			wantPod(t, d)
			c.Stop(5 * time.Second)
			if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.FinishedAt < s.StartedAt ||
				s.FinishedAt < time.Now().Add(-time.Hour).UnixNano() {
				t.Errorf("status after the stop: got %v, started %s, finished %s; want an end just now", s, time.Unix(0, s.StartedAt),
					time.Unix(0, s.FinishedAt))
			}
			pod.Remove()
		})
	}
}

// shifted adds years to every time in a JSON value.
func shifted(v any, years int) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = shifted(v[k], years)
		}
		return v
	case []any:
		for i := range v {
			v[i] = shifted(v[i], years)
		}
		return v
	case string:
		if at, err := time.Parse(time.RFC3339Nano, v); err == nil && at.Year() > 1 {
			return at.AddDate(years, 0, 0).Format(time.RFC3339Nano)
		}
	}
	return v
}
