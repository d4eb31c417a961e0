package manager

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Bounds of kept logs. The oldest lines of a run and the oldest files are removed first.
const (
	keptLines = 4096
	keptBytes = 64 << 10 // of the lines of a run
	keptFiles = 512
	keptTotal = 16 << 20  // bytes of all files
	keptFile  = 512 << 10 // bytes of a file: keptBytes of control characters, which have six bytes in JSON, and the other fields
)

// Bounds of requests for logs.
const (
	logRequests     = 16        // that wait
	logRequestBytes = 4 << 10   // of a request, which its answer repeats in part
	logAnswerBytes  = 128 << 10 // of the log in an answer, in its JSON form
)

// keptLogs keeps the log of the last ended run of each module, in a file for each.
type keptLogs struct {
	dir string
	mu  sync.Mutex
}

// keptLog is the log of a run, in a file and in the answer to a request.
type keptLog struct {
	Type    string          `json:"type"`
	UUID    string          `json:"uuid"`
	Name    string          `json:"name,omitempty"`
	Runtime string          `json:"runtime"`
	Ended   *time.Time      `json:"ended,omitempty"` // missing while the module runs
	Exit    json.RawMessage `json:"exit,omitempty"`  // status of the end
	Cut     bool            `json:"cut,omitempty"`   // the log began earlier
	Log     string          `json:"log"`
	Error   string          `json:"error,omitempty"` // why there is no log
}

func (k *keptLogs) path(runtime, uuid string) string {
	sum := sha256.Sum256([]byte(runtime + "/" + uuid))
	return filepath.Join(k.dir, hex.EncodeToString(sum[:16]))
}

// put replaces the module's kept log.
func (k *keptLogs) put(l keptLog) error {
	raw, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if len(raw) > keptFile {
		return fmt.Errorf("the log and its fields have %d bytes, more than %d: %w", len(raw), keptFile, errdefs.ErrResourceExhausted)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := os.MkdirAll(k.dir, 0o700); err != nil {
		return err
	}
	if err := atomicfile.Replace(k.path(l.Runtime, l.UUID), raw, 0o600); err != nil {
		return err
	}
	return k.prune()
}

// get returns the module's kept log. The error is errdefs.ErrNotFound if there is none.
func (k *keptLogs) get(runtime, uuid string) (l keptLog, err error) {
	raw, err := os.ReadFile(k.path(runtime, uuid))
	if errors.Is(err, fs.ErrNotExist) {
		return l, fmt.Errorf("no log of an ended run of module %s is kept: %w", uuid, errdefs.ErrNotFound)
	}
	if err == nil {
		err = json.Unmarshal(raw, &l)
	}
	return l, err
}

// prune removes the oldest files beyond the bounds, and files of an earlier daemon that are too large. The caller holds
// k.mu.
func (k *keptLogs) prune() error {
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return err
	}
	var files []fs.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			files = append(files, info)
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int {
		return cmp.Or(b.ModTime().Compare(a.ModTime()), cmp.Compare(a.Name(), b.Name()))
	})
	total, errs := int64(0), []error(nil)
	for i, info := range files {
		oversized := info.Size() > keptFile
		if !oversized {
			total += info.Size()
		}
		if oversized || i >= keptFiles || total > keptTotal {
			errs = append(errs, os.Remove(filepath.Join(k.dir, info.Name())))
		}
	}
	return errors.Join(errs...)
}

// runLog holds the latest lines of the log of a module's current run.
type runLog struct {
	mu    sync.Mutex
	lines *queue[[]byte]
	cut   bool
}

func newRunLog() *runLog { return &runLog{lines: newQueue[[]byte](keptLines, keptBytes)} }

func (r *runLog) add(line []byte) {
	line = bytes.TrimSuffix(line, []byte("\n"))
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(line) >= keptBytes {
		line, r.cut = line[:keptBytes-1], true
	}
	dropped, _ := r.lines.put(bytes.Clone(line), len(line)+1, true)
	r.cut = r.cut || len(dropped) > 0
}

// read returns the lines, and removes them if the run has ended.
func (r *runLog) read(ended bool) (text string, cut bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	lines := r.lines.empty()
	cut = r.cut
	if ended {
		r.cut = false
	} else {
		for _, line := range lines {
			r.lines.put(line, len(line)+1, true)
		}
	}
	return string(bytes.ToValidUTF8(bytes.Join(lines, []byte("\n")), []byte("\uFFFD"))), cut
}

// log publishes a line of a module's log, and keeps it until the module has ended.
func (h *host) log(mod *module, line []byte) {
	mod.log.add(line)
	h.m.out.put(h.m.config.Topics.ModuleLog(h.info.UUID, mod.uuid), 0, line)
}

// keepLog keeps the log of a run that has ended. A module that was not created had no run.
func (h *host) keepLog(mod *module, payload []byte) {
	exit := reportedExit(payload)
	text, cut := mod.log.read(true)
	if text == "" && notCreated(exit) != "" {
		return
	}
	now := time.Now().UTC()
	l := keptLog{Type: "module", UUID: mod.uuid, Name: excerpt([]byte(mod.data.Name())), Runtime: h.info.UUID, Ended: &now, Exit: exit,
		Cut: cut, Log: text}
	if run, ok := h.blamedRun(mod, payload); ok && text == "" {
		l, l.Exit = run, exit
	}
	if err := h.m.logs.put(l); err != nil {
		h.m.refuse("log", "cannot keep the log of a module", "module", mod.uuid, "err", err)
	}
}

// blamedRun returns the kept log of the run in which the module made its runtime die, if the exit says that it did. The
// log was kept when the runtime died, and the module is blamed later.
func (h *host) blamedRun(mod *module, payload []byte) (l keptLog, ok bool) {
	if _, reason := outcome(payload); reason != reasonCrash {
		return l, false
	}
	l, err := h.m.logs.get(h.info.UUID, mod.uuid)
	_, reason := outcome(object(map[string]any{"status": l.Exit}))
	return l, err == nil && (reason == "runtime-lost" || reason == reasonCrash)
}

// logRequest is a request for the log of a module of a host.
type logRequest struct {
	host *host
	msg  mqtt.Message
}

// askLog queues a request for a log, because an answer may wait for room in the client's queue, and the client's handler
// must not. It drops the request if there is no room.
func (h *host) askLog(msg mqtt.Message) {
	if len(msg.Payload) > logRequestBytes {
		h.m.refuse("log-request", "a request for a log is too large", "runtime", h.info.Name, "bytes", len(msg.Payload))
		return
	}
	select {
	case h.m.logRequests <- logRequest{h, msg}:
	default:
		h.m.refuse("log-request", "too many requests for logs", "runtime", h.info.Name, "waiting", logRequests)
	}
}

// answerLogs answers the requests for logs, one after the other.
func (m *Manager) answerLogs() {
	for {
		select {
		case r := <-m.logRequests:
			r.host.answerLog(r.msg)
		case <-m.ctx.Done():
			return
		}
	}
}

// answerLog answers a request for a module's log: that of the current run so far or, if the module does not run or the
// request is for the previous run, that of the last ended one. The answer has the object_id of the request.
func (h *host) answerLog(msg mqtt.Message) {
	e, err := wire.ParseEnvelope(msg.Payload)
	if err != nil || e.IsResponse() || e.Action != wire.ActionLog || msg.Retain {
		h.m.counts.ignored.Inc()
		return
	}
	var want struct {
		UUID     string `json:"uuid"`
		Previous bool   `json:"previous"`
		Tail     int    `json:"tail"` // lines; 0: all
	}
	if err = json.Unmarshal(e.Data, &want); err == nil {
		err = wire.ValidName("uuid", want.UUID)
	}
	if err != nil {
		h.m.fail("log", e, e.Data, fmt.Errorf("log: %w", err))
		return
	}
	l, err := h.logOf(want.UUID, want.Previous)
	if err != nil {
		l = keptLog{Type: "module", UUID: want.UUID, Runtime: h.info.UUID, Error: err.Error()}
	}
	log, cut := latest(tail(l.Log, want.Tail), logAnswerBytes)
	l.Log, l.Cut = log, l.Cut || cut
	raw, err := json.Marshal(l)
	if err != nil {
		h.m.fail("log", e, e.Data, fmt.Errorf("log: %w", err))
		return
	}
	h.m.publish(h.m.ctx, h.m.config.Topics.KeptLog(h.info.UUID, want.UUID), 1, false, e.Answer(raw).Bytes())
}

func (h *host) logOf(uuid string, previous bool) (keptLog, error) {
	h.mu.Lock()
	mod := h.byUUID[uuid]
	running := mod != nil && (mod.state == running || mod.state == deleting)
	h.mu.Unlock()
	if previous || !running {
		return h.m.logs.get(h.info.UUID, uuid)
	}
	text, cut := mod.log.read(false)
	return keptLog{Type: "module", UUID: uuid, Name: excerpt([]byte(mod.data.Name())), Runtime: h.info.UUID, Cut: cut, Log: text}, nil
}

// tail returns the last n lines of a text; 0 means all.
func tail(text string, n int) string {
	if n <= 0 {
		return text
	}
	for i := len(text) - 1; i >= 0; i-- {
		if text[i] == '\n' {
			if n--; n == 0 {
				return text[i+1:]
			}
		}
	}
	return text
}

// latest returns the latest lines of a text whose JSON form has at most so many bytes, and whether it left lines out. If
// the last line alone has more, latest returns its end.
func latest(text string, most int) (lines string, cut bool) {
	begin := len(text)
	for begin > 0 {
		r, n := utf8.DecodeLastRuneInString(text[:begin])
		if most -= max(n, jsonBytes(r)); most < 0 {
			break
		}
		begin -= n
	}
	if begin == 0 {
		return text, false
	}
	if text[begin-1] != '\n' {
		if _, whole, ok := strings.Cut(text[begin:], "\n"); ok {
			return whole, true
		}
	}
	return text[begin:], true
}

// jsonBytes returns the size of a character in a JSON string if it is escaped there, otherwise 0.
func jsonBytes(r rune) int {
	switch {
	case strings.ContainsRune("\"\\\n\r\t", r):
		return len(`\n`)
	case r < ' ', strings.ContainsRune("<>&\u2028\u2029", r), r == utf8.RuneError:
		return len(`\u0000`)
	}
	return 0
}
