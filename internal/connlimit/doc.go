// Package connlimit bounds the connections of the addresses that a process listens at, so that a client that opens
// thousands of them harms neither the other clients nor the process (fault C11).
//
//	Group    a process: the file descriptors that all addresses together may hold
//	  └─ Limiter   an address: its connections, and those of one peer
//	       └─ Conn    a connection: new, busy with requests, or idle
//
// A connection is new until its first request has come whole, busy while requests are answered, and idle otherwise. When
// there is no room for one more, a connection that is not busy is closed for it: a client that sends nothing
// cannot keep others out. Where all are busy the newcomer is refused. Closed and refused connections are counted, and
// logged in one line for each address and interval.
//
// TCP servers take Limiter.Listener, whose connections leave by Close. HTTP servers are made by Limiter.HTTPServer, which sets
// the bounds of time and size, too. Others, as for QUIC, call Limiter.Admit, Conn.Begin, Conn.End and Conn.Leave themselves.
package connlimit
