package kubelet

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestLogsAreQuiet: neither the kubelet nor the daemon logs an error or a warning that is ours while 300 pods of each kind come and
// go and the daemon is killed ten times in the middle of it.
func TestLogsAreQuiet(t *testing.T) {
	c := kube.Shared(t)
	kubelet, daemon := from(t, c.Kubelet), from(t, c.Daemon)
	var kills []kill
	for _, burst := range []struct {
		crowd
		times, kills int
	}{{linuxCrowd, 3, 4}, {wasmCrowd, 3, 4}, {vmCrowd, 30, 2}} {
		n := c.Namespace(t)
		n.Apply(burst.deployment())
		scale(n, 1) // pulls the image; a kubelet refuses to pull for 100 pods at once
		for range burst.times {
			for _, pods := range []int{burst.pods, 0} {
				n.Kubectl("scale", "deployment/many", fmt.Sprint("--replicas=", pods))
				if burst.kills--; burst.kills >= 0 {
					time.Sleep(time.Duration(len(kills)+1) * 300 * time.Millisecond) // pacing: the kubelet is in the middle of its work
					k := kill{begin: time.Now()}
					if err := errors.Join(c.Daemon.Kill(), c.Daemon.Start(), c.WaitRuntime()); err != nil {
						t.Fatal(err)
					}
					k.end = time.Now()
					kills = append(kills, k)
				}
				n.WaitPods("app=many", pods, burstTimeout)
			}
		}
	}
	t.Logf("daemon killed %d times", len(kills))
	checkQuiet(t, kubelet, daemon, kills)
}

// checkQuiet checks that the new lines of the logs have no error or warning that is ours.
func checkQuiet(t *testing.T, kubelet, daemon newLines, kills []kill) {
	t.Helper()
	for text, count := range kubelet.problems(t, func(line string) bool { return klogProblem.MatchString(line) && !ofKubelet(line, kills) }) {
		t.Errorf("kubelet, %d times: %s", count, text)
	}
	for text, count := range daemon.problems(t, slogProblem.MatchString) {
		t.Errorf("daemon, %d times: %s", count, text)
	}
}

var (
	klogProblem = regexp.MustCompile(`^[EWF]\d{4} `)
	slogProblem = regexp.MustCompile(`level=(WARN|ERROR)`)

	// fromKills matches what a kubelet logs of calls that a killed runtime does not answer.
	fromKills = regexp.MustCompile(`code = Unavailable|error reading (from server|server preface): (connection reset by peer|EOF)|connection refused|"Failed to stop sandbox" podSandboxID=`)
	// always matches what a kubelet logs with each runtime: it reads the cgroup of a pod after it has removed it
	// (convertToAPIPodLevelResourcesStatus), it removes a container twice, by its garbage collection and when it hears of the
	// container's end (removeContainerLog asks for the status of what is gone), it asks the API server for a pod that was
	// deleted, and it closes the WebSocket of an exec that has ended while it reads from it.
	always = regexp.MustCompile(`"failed to read memory cgroup (config|limits) for the pod"|"ContainerStatus from runtime service failed" err="rpc error: code = NotFound |` +
		`"Failed to get status for pod" err="pods .* is forbidden: .* no relationship found|"Error on socket receive" err="read tcp .*: use of closed network connection"`)
	// ofSlowness matches what a kubelet logs on an emulated host about its own rounds, about the API server, whose answers are late,
	// and of a probe whose answer came too late for the pod's namespace.
	ofSlowness = regexp.MustCompile(`"Housekeeping took longer than expected"|"Failed to get system container stats"|/apis?/.*(Client.Timeout exceeded|context deadline exceeded)|` +
		`"(Error updating|Unable to update) node status|"Failed to (update lease|ensure lease exists)|the object has been modified|kube-api-access-.*no relationship found|` +
		`"Server rejected event \(will not retry!\)" err="namespaces .* not found"|failed to sync (configmap|secret) cache: timed out waiting for the condition`)
)

// kill is the time from a kill of the daemon until its next process answers.
type kill struct{ begin, end time.Time }

// graceOfCalls is the time after a kill in which a kubelet may still log calls that the kill has ended.
const graceOfCalls = 5 * time.Second

// ofKubelet reports whether an error or a warning in a kubelet's log is the kubelet's own, or comes from a kill.
func ofKubelet(line string, kills []kill) bool {
	if always.MatchString(line) || harness.Installed() && ofSlowness.MatchString(line) {
		return true
	}
	at, err := time.ParseInLocation("2006 0102 15:04:05.000000", fmt.Sprint(time.Now().Year(), " ", line[1:min(len(line), 21)]), time.Local)
	return err == nil && fromKills.MatchString(line) && slices.ContainsFunc(kills, func(k kill) bool {
		return at.After(k.begin) && at.Before(k.end.Add(graceOfCalls))
	})
}

// newLines is the part of a program's log after a point.
type newLines struct {
	path string
	at   int64
}

func from(t *testing.T, p *kube.Process) newLines {
	t.Helper()
	info, err := os.Stat(p.LogPath)
	if err != nil {
		t.Fatal(err)
	}
	return newLines{p.LogPath, info.Size()}
}

// problems counts the new lines that are problems, without what differs between them.
func (l newLines) problems(t *testing.T, isProblem func(line string) bool) map[string]int {
	t.Helper()
	file, err := os.Open(l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.NewSectionReader(file, l.at, math.MaxInt64-l.at))
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for line := range strings.Lines(string(text)) {
		if isProblem(line) {
			counts[differs.ReplaceAllString(strings.TrimSpace(line), "…")]++
		}
	}
	return counts
}

// differs matches the parts of a line that differ from pod to pod.
var differs = regexp.MustCompile(`[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|many-[0-9a-z]+-[0-9a-z]+|\d+`)
