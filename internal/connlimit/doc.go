// Package connlimit limits the connections to the addresses that a process listens on, so that a client that opens
// thousands of connections harms neither the other clients nor the process (fault C11).
//
//	Group    a process: limits the file descriptors of all addresses together
//	  └─ Limiter   an address: limits its connections, in total and per peer
//	       └─ Conn    a connection: new, busy with requests, or idle
//
// A connection is new until its first request has arrived completely, busy while requests are answered, and otherwise
// idle. At a limit, a connection that is not busy is closed to make room for the next one, so a client that sends
// nothing cannot lock out other clients. If all connections are busy, the next one is refused. Connections that are
// refused or closed at a limit are counted, and logged in one line per address and interval.
//
// TCP servers use Limiter.Listener, whose connections call Conn.Leave when they are closed. HTTP servers come from
// Limiter.HTTPServer, which also sets the timeouts and size limits. Other servers, such as QUIC's, call Limiter.Admit,
// Conn.Begin, Conn.End and Conn.Leave themselves.
package connlimit
