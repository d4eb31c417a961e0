package broker_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/test/until"
)

// smallDisk mounts a file system of 4 MiB and returns its path.
func smallDisk(t *testing.T) string {
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	return dir
}

// fill writes a file until the disk is full, and returns the function that removes it.
func fill(t *testing.T, dir string) (empty func()) {
	path := filepath.Join(dir, "other")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, unix.ENOSPC)
	return func() { require.NoError(t, os.Remove(path)) }
}

// TestFullDisk: while the disk is full, the broker serves with what it has in memory, and counts that. Once there is room,
// everything is on the disk.
func TestFullDisk(t *testing.T) {
	dir := smallDisk(t)
	cfg := broker.Config{Path: filepath.Join(dir, "broker.db")}
	s := embedded(t, cfg)
	away, _ := login(t, s, 5, keeping("away"))
	away.join(2, "queue/#")
	away.leave()
	finish := neighbour(t, s)
	pub, _ := login(t, s, 5, keeping("pub"))
	gone, _ := login(t, s, 5, hello{id: "gone", will: &message{topic: "will", payload: "gone", qos: 1, retain: true}})
	pub.publish(message{topic: "retained/removed", payload: "x", qos: 1, retain: true})

	empty := fill(t, dir)
	const count, size = 20, 20_000
	payload := strings.Repeat("x", size)
	var want []string
	for i := range count {
		body := fmt.Sprint(i, payload)
		want = append(want, body)
		require.Zero(t, pub.publish(message{topic: "queue/1", payload: body, qos: byte(1 + i%2)}).code, "it is taken, although the disk is full")
	}
	require.Positive(t, s.stats().StoreErrors, "and that is counted")
	pub.publish(message{topic: "retained/kept", payload: "y", qos: 1, retain: true})
	pub.publish(message{topic: "retained/removed", qos: 1, retain: true})
	pub.join(1, "sub/#")
	gone.cut()
	until.Holds(t, "the will is published", func() bool { return s.stats().Retained == 2 })
	late, _ := login(t, s, 5, keeping("late"))
	late.join(1, "late")
	late.leave()

	empty()
	failed := s.stats().StoreErrors
	pub.publish(message{topic: "retained/last", payload: "z", qos: 1, retain: true})
	assert.LessOrEqual(t, s.stats().StoreErrors, failed+1, "once there is room, writes succeed")
	finish()

	// As if the broker was killed now: another one starts with a copy of the file.
	copied := filepath.Join(t.TempDir(), "broker.db")
	file, err := os.ReadFile(cfg.Path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(copied, file, 0o600))
	next := embedded(t, broker.Config{Path: copied})
	again, ack := login(t, next, 5, keeping("away"))
	require.True(t, ack.session)
	assert.Equal(t, want, again.payloads(count))
	again.quiet(again)
	other, ack := login(t, next, 5, keeping("late"))
	assert.True(t, ack.session, "a session that began while the disk was full")
	other.join(1, "retained/#", "will")
	got := map[string]string{}
	for range 3 {
		f := other.receive()
		got[f.topic] = f.payload
	}
	assert.Equal(t, map[string]string{"retained/kept": "y", "retained/last": "z", "will": "gone"}, got)
	other.quiet(other)
	back, ack := login(t, next, 5, keeping("pub"))
	require.True(t, ack.session)
	again.publish(message{topic: "sub/1", qos: 1})
	assert.Equal(t, "sub/1", back.receive().topic, "a subscription of that time")
}
