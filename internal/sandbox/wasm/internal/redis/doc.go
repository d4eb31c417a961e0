// Package redis keeps the pairs of wasi:keyvalue in a Redis server. Client is a wasi.Store. Begin with ParseURL.
//
// The package has its own client, because the server is the choice of a pod, but its replies are parsed in a process that
// several pods share: no length that a server announces leads to an allocation before the pod's account is charged for it,
// and each reply is bounded. It speaks RESP2 (https://redis.io/docs/latest/develop/reference/protocol-spec), the protocol
// of all servers.
//
// The package opens no sockets by itself, and knows nothing of pods.
package redis
