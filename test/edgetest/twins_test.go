package edgetest_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/manager"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/test/edgetest"
)

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// count returns the number of lines with all the texts.
func (l *lines) count(texts ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		all := true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			n++
		}
	}
	return n
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// logs shows logs of a test that fails.
func logs(t *testing.T, all ...*lines) {
	t.Cleanup(func() {
		for _, l := range all {
			if t.Failed() {
				t.Log("\n" + l.text.String())
			}
		}
	})
}

// A node whose disk is a clone of another's takes over from it, once: the two do not disconnect each other for ever. Both say
// who the other one is. When one of them ends, the other one comes back.
func TestTwinManagers(t *testing.T) {
	for name, start := range brokers {
		t.Run(name, func(t *testing.T) {
			url := start(t)
			openOrchestrator(t, url)
			open := func(name string, log *lines) *manager.Manager {
				m, err := manager.Open(manager.Config{
					Root: t.TempDir(), UUID: edgetest.ManagerUUID, Name: name, Topics: wire.Topics{Realm: edgetest.Realm}, MQTT: mqtt.Config{URL: url},
					RegisterTimeout: 300 * time.Millisecond, Log: log.logger(),
				})
				require.NoError(t, err)
				return m
			}
			var one, two lines
			logs(t, &one, &two)
			first := open("one", &one)
			require.Eventually(t, func() bool { return one.count("edge: registered") == 1 }, patience, 5*time.Millisecond)
			second := open("two", &two)
			require.Eventually(t, func() bool {
				return one.count("another node", "name=two") > 0 && two.count("another node", "name=one") > 0
			}, patience, 5*time.Millisecond)
			up := func(l *lines) bool {
				return l.count("edge: registered") > l.count("edge: connection to the broker lost")
			}
			require.Eventually(t, func() bool { return up(&one) != up(&two) }, patience, 5*time.Millisecond)
			staying, stayed := second, &one
			if up(&one) { // with a broker that gives no reason, either can be the one that waits
				staying, stayed = first, &two
			}
			before := stayed.count("edge: registered")
			require.NoError(t, staying.Close(within(t)))
			require.Eventually(t, func() bool { return stayed.count("edge: registered") > before }, patience, 5*time.Millisecond)
			require.NoError(t, first.Close(within(t)))
			require.NoError(t, second.Close(within(t)))
		})
	}
}

// Two orchestrators of one realm: with the same session one of them waits, and with two sessions both report the other.
func TestTwinOrchestrators(t *testing.T) {
	for name, start := range brokers {
		t.Run(name, func(t *testing.T) {
			url := start(t)
			open := func(session string, log *lines) *orchestrator.Orchestrator {
				o, err := orchestrator.Open(within(t), orchestrator.Config{
					Path: filepath.Join(t.TempDir(), "record.db"), Topics: wire.Topics{Realm: edgetest.Realm}, Connect: mqtt.New,
					Broker: mqtt.Config{URL: url, ClientID: session}, AnswerTimeout: 300 * time.Millisecond, Log: log.logger(),
				})
				require.NoError(t, err)
				require.Eventually(t, o.Connected, patience, 5*time.Millisecond)
				return o
			}
			var one, two, other lines
			logs(t, &one, &two)
			first, second := open("session", &one), open("session", &two)
			require.Eventually(t, func() bool {
				return one.count("another orchestrator of this realm runs") > 0 && two.count("another orchestrator of this realm runs") > 0
			}, patience, 5*time.Millisecond)
			require.Eventually(t, func() bool { return first.Connected() != second.Connected() }, patience, 5*time.Millisecond)
			waiting := &one
			if first.Connected() {
				first, second, waiting = second, first, &two
			}
			w := httptest.NewRecorder()
			first.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
			assert.Equal(t, http.StatusServiceUnavailable, w.Code)
			require.NoError(t, second.Close(within(t)))
			require.Eventually(t, first.Connected, patience, 5*time.Millisecond)

			third := open("another session", &other)
			_, end := ourManager(t, url, false)
			require.Eventually(t, func() bool {
				return waiting.count("answers registrations") > 0 && other.count("answers registrations") > 0
			}, patience, 5*time.Millisecond)
			require.NoError(t, end())
			require.NoError(t, third.Close(within(t)))
			require.NoError(t, first.Close(within(t)))
		})
	}
}
