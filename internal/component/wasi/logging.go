package wasi

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"unicode/utf8"
)

// Limits of an entry of wasi:logging, in bytes. What is longer is cut off, and the entry says so.
const (
	maxLogContext = 1 << 10
	maxLogMessage = 64 << 10
)

// logLevels are the levels of wasi:logging in order, as entries show them.
var logLevels = [...]string{"TRACE", "DEBUG", "INFO", "WARN", "ERROR", "CRITICAL"}

// levelWarn is the index of WARN in logLevels.
const levelWarn = 3

// loggingFuncs write entries to Options.Log: one line each, in logfmt as log/slog writes it, so that a message with
// line breaks cannot look like two entries.
var loggingFuncs = map[string]Func{
	"log": func(c *Call) error {
		level, name, message := c.In.Case(len(logLevels)), c.In.String(), c.In.String()
		if err := c.In.Err(); err != nil || c.options.Log == nil {
			return err
		}
		c.options.Log(logEntry(level, name, message))
		return nil
	},
}

// logEntry returns an entry with its line break.
func logEntry(level int, name, message string) []byte {
	var line bytes.Buffer
	h := slog.NewTextHandler(&line, &slog.HandlerOptions{Level: slog.Level(0), ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.LevelKey {
			a.Value = slog.StringValue(logLevels[level])
		}
		return a
	}})
	entry := slog.Record{Message: cut(message, maxLogMessage)} // without a time, because each line of the log has one
	if name != "" {
		entry.AddAttrs(slog.String("context", cut(name, maxLogContext)))
	}
	_ = h.Handle(context.Background(), entry) // a buffer has no errors
	return line.Bytes()
}

// cut returns at most the first n bytes of a text, and says how many are missing.
func cut(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return fmt.Sprintf("%s… (%d bytes more)", text[:n], len(text)-n)
}
