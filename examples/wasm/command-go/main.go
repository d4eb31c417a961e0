// Command-go is a command for WASI preview 1: it does what its arguments say, one after the other, and exits.
//
//	args                 print the arguments, one a line
//	env [NAME]           print the environment, or one variable
//	stdin                copy standard input to standard output
//	ls DIR, cat FILE     print a directory, a file
//	write FILE TEXT      write a file
//	out TEXT, err TEXT   print a line on standard output, on standard error
//	sleep DURATION       wait ("1s")
//	spin                 compute for ever
//	panic                panic
//	exit CODE            exit with a code
//
// Build it with GOOS=wasip1 GOARCH=wasm. It does not use fmt, which would add a third to its size.
package main

import (
	"errors"
	"io"
	"os"
	"strconv"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		println("usage: command-go ACTION [OPERAND]... (see the source)")
		os.Exit(2)
	}
	rest := os.Args[1:]
	for len(rest) > 0 {
		action := rest[0]
		n, err := do(action, append(rest[1:len(rest):len(rest)], "", ""))
		if err != nil {
			os.Stderr.WriteString("command-go: " + action + ": " + err.Error() + "\n")
			os.Exit(1)
		}
		rest = rest[min(1+n, len(rest)):]
	}
}

// do does one action and returns how many operands it took.
func do(action string, operand []string) (int, error) {
	switch action {
	case "args":
		return 0, lines(os.Args)
	case "env":
		if operand[0] == "" {
			return 0, lines(os.Environ())
		}
		return 1, lines([]string{os.Getenv(operand[0])})
	case "stdin":
		_, err := io.Copy(os.Stdout, os.Stdin)
		return 0, err
	case "ls":
		entries, err := os.ReadDir(operand[0])
		for _, e := range entries {
			err = errors.Join(err, lines([]string{e.Name()}))
		}
		return 1, err
	case "cat":
		data, err := os.ReadFile(operand[0])
		os.Stdout.Write(data)
		return 1, err
	case "write":
		return 2, os.WriteFile(operand[0], []byte(operand[1]+"\n"), 0o644)
	case "out":
		return 1, lines([]string{operand[0]})
	case "err":
		_, err := os.Stderr.WriteString(operand[0] + "\n")
		return 1, err
	case "sleep":
		d, err := time.ParseDuration(operand[0])
		time.Sleep(d)
		return 1, err
	case "spin":
		for turns := 0; ; turns++ {
			_ = turns
		}
	case "panic":
		panic("asked to")
	case "exit":
		code, err := strconv.Atoi(operand[0])
		if err == nil {
			os.Exit(code)
		}
		return 1, err
	}
	return 0, errors.New("no such action")
}

func lines(all []string) error {
	for _, s := range all {
		if _, err := os.Stdout.WriteString(s + "\n"); err != nil {
			return err
		}
	}
	return nil
}
