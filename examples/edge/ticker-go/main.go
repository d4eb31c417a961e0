// Ticker publishes "tick 1", "tick 2", ... on the channel "out" until it is stopped; its argument is the time between them ("1s").
//
//	tripod edge run ticker-go/ticker.wasm --channel out=app/in:w -- 500ms
//
// Build it with GOOS=wasip1 GOARCH=wasm. A channel is a file below /ch: one write is one message.
package main

import (
	"os"
	"strconv"
	"time"
)

func main() {
	pause := time.Second
	if len(os.Args) > 1 {
		d, err := time.ParseDuration(os.Args[1])
		if err != nil {
			fail(err)
		}
		pause = d
	}
	out, err := os.OpenFile("/ch/out", os.O_WRONLY, 0)
	if err != nil {
		fail(err)
	}
	for n := 1; ; n++ {
		text := "tick " + strconv.Itoa(n)
		if _, err := out.WriteString(text); err != nil {
			fail(err)
		}
		_, _ = os.Stdout.WriteString(text + "\n") // the log
		time.Sleep(pause)
	}
}

func fail(err error) {
	_, _ = os.Stderr.WriteString("ticker: " + err.Error() + "\n")
	os.Exit(1)
}
