package guestagent

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

const (
	// drainTime is how long to wait for output after the program has ended, if a child process still has the program's
	// stdio open.
	drainTime = time.Second
	// drainBytes is the maximum number of bytes to read after the program has ended. This is the size of a pipe's
	// buffer, so all output of the program itself is read.
	drainBytes = 64 << 10
	copyBuffer = 32 << 10
)

// program is a running program with its stdio.
type program struct {
	job    *job
	tty    bool
	child  []*os.File // the program's ends of its stdio; closed once the program has started
	input  *os.File   // the agent's end of the program's stdin; may be nil
	output []output
	ended  atomic.Bool
	copies sync.WaitGroup
}

// output holds the file from which the agent reads the program's stdout or stderr, and the channel on which it sends
// this output to the host.
type output struct {
	file    *os.File
	channel byte
}

// exec runs a program until it ends. If the stream ends first, exec kills the program and all processes in its session.
func (j *job) exec(r wire.Exec) wire.Result {
	if len(r.Args) == 0 {
		return wire.Result{Class: wire.ClassInvalidArgument, Message: "the command is empty"}
	}
	who, err := lookUp(r.User, "/etc/passwd", "/etc/group")
	if err != nil {
		return failed(wire.ClassInvalidArgument, err)
	}
	dir := r.Dir
	if dir == "" {
		dir = who.directory()
	}
	env := who.environment(r.TTY, r.Env)
	path, err := findProgram(r.Args[0], dir, env)
	if err != nil {
		return failed(classOf(err), err)
	}
	p := &program{job: j, tty: r.TTY}
	defer p.close()
	attr := &os.ProcAttr{Dir: dir, Env: env, Sys: &syscall.SysProcAttr{Setsid: true, Credential: who.credential()}}
	if attr.Files, err = p.stdio(r, attr.Sys); err != nil {
		return failed(wire.ClassInternal, err)
	}
	if r.TTY && attr.Sys.Credential != nil {
		_ = p.child[0].Chown(int(who.uid), -1) // so that the user can open the terminal by its name
	}
	process, err := os.StartProcess(path, r.Args, attr)
	if err != nil {
		return failed(classOf(err), err)
	}
	p.closeChild()
	return p.wait(process)
}

// stdio makes the program's stdio: either a terminal, or pipes and /dev/null. It returns the files for descriptors 0 to
// 2.
func (p *program) stdio(r wire.Exec, sys *syscall.SysProcAttr) ([]*os.File, error) {
	if r.TTY {
		master, slave, err := openTerminal(r.Columns, r.Rows)
		if err != nil {
			return nil, err
		}
		p.child = append(p.child, slave)
		p.output = append(p.output, output{master, wire.ChannelOut})
		if r.Stdin {
			p.input = master
		}
		p.job.setTerminal(func(columns, rows uint16) { setSize(master, columns, rows) })
		sys.Setctty = true // with descriptor 0
		return []*os.File{slave, slave, slave}, nil
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	p.child = append(p.child, null)
	files := []*os.File{null, null, null}
	if r.Stdin {
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		p.child, p.input, files[0] = append(p.child, read), write, read
	}
	for _, out := range []struct {
		wanted  bool
		channel byte
	}{{r.Stdout, wire.ChannelOut}, {r.Stderr, wire.ChannelErr}} {
		if !out.wanted {
			continue
		}
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		p.child, files[out.channel] = append(p.child, write), write
		p.output = append(p.output, output{read, out.channel})
	}
	return files, nil
}

// wait copies input and output, waits until the program ends, and returns the result.
func (p *program) wait(process *os.Process) wire.Result {
	stream := p.job.stream
	if p.input != nil {
		stream.Grant(wire.ChannelIn)
		go p.copyIn()
	}
	for _, out := range p.output {
		p.copies.Go(func() { p.copyOut(out) })
	}
	waited := make(chan struct{})
	go func() {
		select {
		case <-stream.Done():
			killSession(process.Pid)
		case <-waited:
		}
	}()
	state, err := process.Wait()
	close(waited)
	p.ended.Store(true)
	for _, out := range p.output {
		_ = out.file.SetReadDeadline(time.Now().Add(drainTime))
	}
	p.copies.Wait()
	if err != nil {
		return failed(wire.ClassInternal, err)
	}
	status := state.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return wire.Result{Exit: int32(128 + status.Signal()), Signal: uint8(status.Signal())}
	}
	return wire.Result{Exit: int32(status.ExitStatus())}
}

// copyIn copies the host's input to the program. When the input ends, copyIn closes the program's stdin if that is a
// pipe, but not if it is a terminal.
func (p *program) copyIn() {
	buf := make([]byte, copyBuffer)
	for {
		n, err := p.job.stream.Read(wire.ChannelIn, buf, nil)
		if n > 0 {
			if _, err := p.input.Write(buf[:n]); err != nil {
				return // the program no longer reads; the host stops sending when the window is used up
			}
		}
		if err != nil {
			if !p.tty {
				_ = p.input.Close()
			}
			return
		}
	}
}

// copyOut copies one of the program's outputs to the host until the output ends. Once the program has ended, copyOut
// copies at most about drainBytes more, which is enough for what the program itself wrote.
func (p *program) copyOut(out output) {
	buf := make([]byte, copyBuffer)
	rest := drainBytes
	for {
		late := p.ended.Load()
		if late {
			if rest <= 0 {
				break
			}
			_ = out.file.SetReadDeadline(time.Now().Add(drainTime))
		}
		n, err := out.file.Read(buf)
		if n > 0 {
			if _, err := p.job.stream.Write(out.channel, buf[:n], nil); err != nil {
				break
			}
			if late {
				rest -= n
			}
		}
		if err != nil {
			break
		}
	}
	p.job.stream.Close(out.channel)
}

func (p *program) closeChild() {
	for _, f := range p.child {
		_ = f.Close()
	}
	p.child = nil
}

func (p *program) close() {
	p.job.setTerminal(nil)
	p.closeChild()
	if p.input != nil {
		_ = p.input.Close()
	}
	for _, out := range p.output {
		_ = out.file.Close()
	}
}

func classOf(err error) wire.Class {
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, os.ErrPermission), errors.Is(err, syscall.ENOEXEC), errors.Is(err, syscall.ENOTDIR),
		errors.Is(err, io.ErrUnexpectedEOF):
		return wire.ClassInvalidArgument
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return wire.ClassExhausted
	}
	return wire.ClassInternal
}

// setTerminal sets the function that sets the size of the job's terminal, and calls it if the size is known. nil means
// that the job has no terminal.
func (j *job) setTerminal(sized func(columns, rows uint16)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.sized = sized
	if sized != nil && j.columns|j.rows != 0 {
		sized(j.columns, j.rows)
	}
}

// resize sets the size of the job's terminal. A client's first size usually arrives before there is a terminal.
func (j *job) resize(columns, rows uint16) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.columns, j.rows = columns, rows
	if j.sized != nil {
		j.sized(columns, rows)
	}
}

func setSize(f *os.File, columns, rows uint16) {
	_ = withFD(f, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows})
	})
}
