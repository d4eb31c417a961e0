package minimal

import (
	"bufio"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	maxLine = 16 << 10 // bytes; a longer line is split
	maxTail = 2 << 10
)

// output follows the program's output.
type output struct {
	*os.File
	done chan struct{}
}

// tail keeps the last maxTail bytes of the output.
type tail struct {
	mu   sync.Mutex
	data []byte
}

func (t *tail) add(line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(append(t.data, line...), '\n')
	if over := len(t.data) - maxTail; over > 0 {
		t.data = t.data[over:]
	}
}

// follow passes each line of the output to the manager, as the runtime's log.
func (l *life) follow(logs *os.File) *output {
	o := &output{File: logs, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		defer logs.Close()
		r := bufio.NewReaderSize(logs, maxLine)
		for listening := true; ; {
			line, err := r.ReadSlice('\n')
			if n := len(line); n > 0 && line[n-1] == '\n' {
				line = line[:n-1]
			}
			if len(line) > 0 {
				l.tail.add(line)
				listening = listening && l.log(line)
			}
			if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
				if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) && !errors.Is(err, os.ErrDeadlineExceeded) {
					l.cfg.Log.Warn("cannot read the output of the runtime program", "err", err)
				}
				return
			}
		}
	}()
	return o
}

// log passes a line to the manager. It reports false if the manager has stopped receiving. Before the program has
// connected, nobody receives, so log must not wait. If the queue is full at that time, the line is dropped. If the
// start fails, the error still contains the line.
func (l *life) log(line []byte) bool {
	m := channel.Message{Header: channel.Header{Control: true, Arg: wire.RuntimeLog}, Payload: append([]byte(nil), line...)}
	select {
	case <-l.up:
		return l.deliver(m)
	default:
	}
	select {
	case l.in <- m:
	default:
	}
	return true
}

// drain reads the rest of the output after the program's end. Later output of its children is dropped.
func (o *output) drain() {
	_ = o.SetReadDeadline(time.Now().Add(drain))
	<-o.done
}
