// Package loglimit limits the log lines about repeated events, separately for each kind of event, and counts the events
// between two lines. It writes no lines itself. Begin with Limiter.
package loglimit
