// Slruntime is a runtime program for tests, like those of other vendors. It implements SLSocket without Tripod's
// packages, from nothing but the edge protocol's golden frames. Each module opens channel 0 for reading and writing on
// "$SL/proc/stdio", sends "hello NAME", echoes what it receives, and ends when it receives "quit" or is deleted.
//
//	slruntime DIR INDEX
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

const (
	control = 0x80

	create, remove, stop = 0, 1, 2 // manager → runtime
	exited, open         = 2, 3    // runtime → manager
	readWrite            = 3
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "slruntime:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 3 {
		return fmt.Errorf("usage: slruntime DIR INDEX")
	}
	index, err := strconv.Atoi(os.Args[2]) // decimal here, hexadecimal in the path
	if err != nil {
		return err
	}
	conn, err := net.Dial("unix", filepath.Join(os.Args[1], fmt.Sprintf("%02x.s", index)))
	if err != nil {
		return err
	}
	fmt.Println("connected") // goes to the runtime's log
	for {
		h1, h2, payload, err := read(conn)
		if err != nil {
			return err
		}
		module := h1 &^ control
		switch {
		case h1&control == 0 && string(payload) == "quit":
			err = write(conn, control|module, exited, []byte(`{"status": "exited"}`))
		case h1&control == 0:
			err = write(conn, module, h2, append([]byte("echo "), payload...))
		case h2 == create:
			err = createModule(conn, module, payload)
		case h2 == remove:
			err = write(conn, control|module, exited, []byte(`{"status": "deleted"}`))
		case h2 == stop:
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func createModule(conn net.Conn, module byte, payload []byte) error {
	var data struct {
		Name string `json:"name"`
	}
	if err := json.Unmarshal(payload, &data); err != nil {
		return err
	}
	// The topic with C's trailing NUL.
	if err := write(conn, control|module, open, append([]byte{0, readWrite}, "$SL/proc/stdio\x00"...)); err != nil {
		return err
	}
	return write(conn, module, 0, []byte("hello "+data.Name))
}

func read(conn net.Conn) (h1, h2 byte, payload []byte, err error) {
	var header [6]byte
	if _, err := io.ReadFull(conn, header[:]); err != nil {
		return 0, 0, nil, err
	}
	payload = make([]byte, binary.LittleEndian.Uint32(header[:4]))
	_, err = io.ReadFull(conn, payload)
	return header[4], header[5], payload, err
}

func write(conn net.Conn, h1, h2 byte, payload []byte) error {
	frame := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	_, err := conn.Write(append(append(frame, h1, h2), payload...))
	return err
}
