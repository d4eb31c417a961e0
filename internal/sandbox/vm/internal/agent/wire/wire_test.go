package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"testing"
	"testing/iotest"
)

func TestStuffing(t *testing.T) {
	for size := range 600 {
		for _, every := range []int{1, 2, 253, 254, 255, 1000} {
			plain := bytes.Repeat([]byte{1}, size)
			for i := every - 1; i < size; i += every {
				plain[i] = 0
			}
			b := stuff(nil, plain)
			if longest := size + size/cobsBlock + 1; bytes.IndexByte(b, 0) >= 0 || len(b) > longest {
				t.Fatalf("stuff(%d bytes, every %dth a zero) = %x, want at most %d bytes without zeros", size, every, b, longest)
			}
			if got, err := unstuff(b); err != nil || !bytes.Equal(got, plain) {
				t.Fatalf("unstuff(stuff(%d bytes, every %dth a zero)) = %x, %v; want the original", size, every, got, err)
			}
		}
	}
}

// TestResynchronize: a frame is found whatever bytes precede it, and however they are split into reads.
func TestResynchronize(t *testing.T) {
	frame := AppendFrame([]byte{0}, 7, 9, KindData, []byte("payload\x00with zeros\x00"))
	other := AppendFrame(nil, 7, 9, KindData, bytes.Repeat([]byte{'x'}, MaxPayload))
	for name, before := range map[string][]byte{
		"nothing": nil, "zeros": make([]byte, 100), "half a frame": frame[1 : len(frame)/2], "text": []byte("login: \r\n"),
		"half a long one": other[:len(other)/2], "more than any frame": bytes.Repeat([]byte{'y'}, 3*maxStuffed),
		"a damaged frame": append(bytes.Clone(frame[:5]), frame[6:]...),
	} {
		stream := append(bytes.Clone(before), frame...)
		for _, r := range []io.Reader{bytes.NewReader(stream), iotest.OneByteReader(bytes.NewReader(stream)),
			iotest.DataErrReader(bytes.NewReader(stream))} {
			frames := NewReader(r)
			f, err := frames.Next()
			if err != nil || f.Session != 7 || f.Stream != 9 || f.Kind != KindData || string(f.Payload) != "payload\x00with zeros\x00" {
				t.Errorf("after %s: Next = %+v, %v; want the frame", name, f, err)
			}
			if _, err := frames.Next(); err != io.EOF {
				t.Errorf("after %s: second Next error = %v, want io.EOF", name, err)
			}
		}
	}
}

func TestMessages(t *testing.T) {
	exec := Exec{Args: []string{"a", ""}, Env: []string{"K=V"}, Dir: "/", User: "u", TTY: true, Columns: 80, Rows: 24, Stdin: true,
		Stderr: true}
	var gotExec Exec
	if err := gotExec.Parse(append(exec.Append(nil), "what a newer one adds"...)); err != nil || !reflect.DeepEqual(gotExec, exec) {
		t.Errorf("Exec.Parse = %+v, %v; want %+v", gotExec, err, exec)
	}
	result := Result{Class: ClassInternal, Message: "m", Exit: -3, Signal: 9, Body: "b"}
	var gotResult Result
	if err := gotResult.Parse(result.Append(nil)); err != nil || gotResult != result {
		t.Errorf("Result.Parse = %+v, %v; want %+v", gotResult, err, result)
	}
	stats := Stats{MemoryTotal: 1 << 40, Load: [3]uint64{1, 2, 3}, Filesystems: []Filesystem{{Path: "/", Total: 5, InodesFree: 6}}}
	var gotStats Stats
	if err := gotStats.Parse(stats.Append(nil)); err != nil || !reflect.DeepEqual(gotStats, stats) {
		t.Errorf("Stats.Parse = %+v, %v; want %+v", gotStats, err, stats)
	}
	info := Info{Program: "p", Uptime: 7, Interfaces: []Interface{{Name: "lo", Addresses: []string{"::1/128"}}}}
	var gotInfo Info
	if err := gotInfo.Parse(info.Append(nil)); err != nil || !reflect.DeepEqual(gotInfo, info) {
		t.Errorf("Info.Parse = %+v, %v; want %+v", gotInfo, err, info)
	}
	if err := gotInfo.Parse(nil); err != nil || !reflect.DeepEqual(gotInfo, Info{}) {
		t.Errorf("Info.Parse(an older version's message) = %+v, %v; want zeros", gotInfo, err)
	}
}

// TestRules: violations of the protocol are ErrSession.
func TestRules(t *testing.T) {
	control := func(*Stream, Frame) error { return nil }
	full := bytes.Repeat([]byte{1}, MaxData+1)
	for name, frames := range map[string][]Frame{
		"a stream that never was":       {{Stream: 2, Kind: KindData, Payload: []byte{1}}},
		"no channel":                    {{Stream: 1, Kind: KindData}},
		"a channel that does not exist": {{Stream: 1, Kind: KindClose, Payload: []byte{9}}},
		"data after the end":            {{Stream: 1, Kind: KindClose, Payload: []byte{1}}, {Stream: 1, Kind: KindData, Payload: []byte{1, 1}}},
		"a window of no size":           {{Stream: 1, Kind: KindWindow, Payload: []byte{0, 1}}},
		"a window without bounds":       {{Stream: 1, Kind: KindWindow, Payload: []byte{0, 0xff, 0, 0, 0}}},
		"data beyond the window": {
			{Stream: 1, Kind: KindData, Payload: full}, {Stream: 1, Kind: KindData, Payload: full}, {Stream: 1, Kind: KindData, Payload: full},
			{Stream: 1, Kind: KindData, Payload: full}, {Stream: 1, Kind: KindData, Payload: full},
		},
	} {
		m := NewMux(1, control)
		if _, err := m.Open(); err != nil {
			t.Fatal(err)
		}
		var err error
		for _, f := range frames {
			if err = m.Handle(f); err != nil {
				break
			}
		}
		if !errors.Is(err, ErrSession) {
			t.Errorf("%s: error = %v, want ErrSession", name, err)
		}
	}
	m := NewMux(1, control)
	for range maxUrgent + 1 {
		m.Urgent(0, KindPong)
	}
	if err := m.Err(); !errors.Is(err, ErrSession) {
		t.Errorf("too many urgent frames: error = %v, want ErrSession", err)
	}
}

// FuzzReader: a Reader finds the last frame, whatever bytes precede it.
func FuzzReader(f *testing.F) {
	f.Add(AppendFrame(nil, 1, 2, KindHello, Hello{1, 1}.Append(nil)))
	f.Add([]byte("\x00\x01\x00\xff\x00"))
	f.Add(bytes.Repeat([]byte{5}, 1000))
	last := AppendFrame([]byte{0}, 0xfeed, 1, KindReady)
	f.Fuzz(func(t *testing.T, b []byte) {
		frames := NewReader(bytes.NewReader(append(bytes.Clone(b), last...)))
		var got Frame
		for {
			next, err := frames.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = next
		}
		if got.Session != 0xfeed || got.Kind != KindReady {
			t.Fatalf("last frame = %+v, want session feed, kind KindReady", got)
		}
	})
}

// FuzzMessages: any bytes can be parsed or refused, and a parsed message survives encoding and parsing again.
func FuzzMessages(f *testing.F) {
	f.Add(Exec{Args: []string{"a"}, Env: []string{"b=c"}}.Append(nil))
	f.Add(Result{Class: ClassInternal, Message: "x", Exit: -1}.Append(nil))
	f.Add(Info{Program: "x", Interfaces: []Interface{{Name: "lo"}}}.Append(nil))
	f.Add(Stats{Filesystems: []Filesystem{{Path: "/"}}}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var exec, exec2 Exec
		if exec.Parse(b) == nil && (exec2.Parse(exec.Append(nil)) != nil || !reflect.DeepEqual(exec, exec2)) {
			t.Errorf("Exec %+v became %+v", exec, exec2)
		}
		var result, result2 Result
		if result.Parse(b) == nil && (result2.Parse(result.Append(nil)) != nil || result != result2) {
			t.Errorf("Result %+v became %+v", result, result2)
		}
		var info, info2 Info
		if info.Parse(b) == nil && (info2.Parse(info.Append(nil)) != nil || !reflect.DeepEqual(info, info2)) {
			t.Errorf("Info %+v became %+v", info, info2)
		}
		var stats, stats2 Stats
		if stats.Parse(b) == nil && (stats2.Parse(stats.Append(nil)) != nil || !reflect.DeepEqual(stats, stats2)) {
			t.Errorf("Stats %+v became %+v", stats, stats2)
		}
		var hello Hello
		var welcome Welcome
		var dial Dial
		_, _, _ = hello.Parse(b), welcome.Parse(b), dial.Parse(b)
	})
}

// FuzzMux: no sequence of frames panics or blocks. The Mux accepts them or ends the session.
func FuzzMux(f *testing.F) {
	f.Add([]byte{byte(KindData), 1, 1, 'x', byte(KindClose), 1, 1, 0, byte(KindResult), 1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := NewMux(1, func(s *Stream, _ Frame) error { s.Finish(); return nil })
		s, err := m.Open()
		if err != nil {
			t.Fatal(err)
		}
		for len(b) >= 4 {
			frame := Frame{Session: 1, Kind: Kind(b[0]), Stream: uint32(b[1] % 3), Payload: b[2:4]}
			if len(b) > 8 && b[3]&1 == 1 {
				frame.Payload = b[2:8]
			}
			b = b[4:]
			if err := m.Handle(frame); err != nil {
				m.End(err)
				break
			}
		}
		m.End(ErrEnded)
		for channel := range byte(channels) {
			for {
				if _, err := s.Read(channel, make([]byte, 64), nil); err != nil {
					break
				}
			}
		}
		if _, err := s.Write(ChannelIn, []byte("x"), nil); !errors.Is(err, ErrEnded) {
			t.Errorf("Write after the session's end: error = %v, want ErrEnded", err)
		}
	})
}
