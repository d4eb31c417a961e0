package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/prop"
)

const (
	loginName    = "org.freedesktop.login1"
	loginPath    = "/org/freedesktop/login1"
	loginManager = "org.freedesktop.login1.Manager"
)

// longestDelay is how long a program may delay a shutdown. Systemd's own is 5 s, which a kubelet raises by a file in
// /etc/systemd; it leaves a longer one as it is.
const longestDelay = 10 * time.Minute

// login is the part of logind that a kubelet uses: it lets programs delay a shutdown, and announces one.
type login struct {
	mu    sync.Mutex
	locks []*os.File // our copies, which the answers send
}

// runLogind serves logind on a bus. A line "true" of the standard input announces a shutdown, "false" that it was
// cancelled. It prints "delayed" when a program takes a lock, and "released" when the program closes it.
func runLogind(ctx context.Context, socket string) error {
	conn, err := dbus.Connect("unix:path=" + socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	l := &login{}
	if err := conn.Export(l, loginPath, loginManager); err != nil {
		return err
	}
	if _, err := prop.Export(conn, loginPath, prop.Map{
		loginManager: {"InhibitDelayMaxUSec": {Value: uint64(longestDelay.Microseconds())}},
	}); err != nil {
		return err
	}
	if reply, err := conn.RequestName(loginName, dbus.NameFlagDoNotQueue); err != nil || reply != dbus.RequestNameReplyPrimaryOwner {
		return fmt.Errorf("request the name %s: %v %w", loginName, reply, err)
	}
	fmt.Println("serving")
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			l.drop()
			if err := conn.Emit(loginPath, loginManager+".PrepareForShutdown", lines.Text() == "true"); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}()
	<-ctx.Done()
	return nil
}

// Inhibit returns a lock: a file that delays a shutdown until its last copy is closed.
func (l *login) Inhibit(what, who, why, mode string) (dbus.UnixFD, *dbus.Error) {
	r, w, err := os.Pipe()
	if err != nil {
		return -1, dbus.MakeFailedError(err)
	}
	fmt.Println("delayed", what, who, mode)
	l.mu.Lock()
	l.locks = append(l.locks, w) // the answer with the file is sent after Inhibit returns
	l.mu.Unlock()
	go func() {
		defer r.Close()
		if n, _ := r.Read(make([]byte, 1)); n == 0 {
			fmt.Println("released", who)
		}
	}()
	return dbus.UnixFD(w.Fd()), nil
}

// drop closes our copies of the locks, so that those of the programs are the last.
func (l *login) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.locks {
		w.Close()
	}
	l.locks = nil
}
