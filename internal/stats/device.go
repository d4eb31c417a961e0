package stats

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

type blockDevice struct{ name, major, minor string }

// devices are the names of block devices that were looked up within the last deviceAge, by number. All containers of a
// scrape use the same few devices. A number can belong to another device later, so names are not kept longer.
var devices struct {
	sync.Mutex
	since time.Time
	names map[string]string
}

const deviceAge = time.Second

// findDevice returns the device with the given number, such as 8:0. If the device has gone, its name is the number.
func findDevice(number string) (blockDevice, bool) {
	major, minor, ok := strings.Cut(number, ":")
	if !ok {
		return blockDevice{}, false
	}
	return blockDevice{name: deviceName(number), major: major, minor: minor}, true
}

func deviceName(number string) string {
	devices.Lock()
	defer devices.Unlock()
	if time.Since(devices.since) > deviceAge {
		devices.since, devices.names = time.Now(), map[string]string{}
	}
	name, known := devices.names[number]
	if !known {
		name = number
		if target, err := os.Readlink("/sys/dev/block/" + number); err == nil {
			name = "/dev/" + strings.ReplaceAll(filepath.Base(target), "!", "/")
		}
		devices.names[number] = name
	}
	return name
}
