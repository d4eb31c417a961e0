package vmwrap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

const (
	// firstSet is the number of our first descriptor set. libvirt numbers its own sets from 0.
	firstSet  = 1000
	firstSlot = 0x10
	// defaultMTU is the guest's MTU if QEMU sets none.
	defaultMTU = 1500
)

// edit applies a grant to QEMU's arguments. The parameter fds holds the numbers of the grant's descriptors in this
// process. Each entry of the grant must match exactly one argument. Otherwise the grant belongs to another domain, and
// edit returns errdefs.ErrFailedPrecondition.
func edit(args []string, g Grant, fds []int) ([]string, error) {
	e := &editor{args: slices.Clone(args), fds: fds}
	for _, f := range g.Files {
		e.file(f)
	}
	for _, p := range g.Plain {
		e.plain(p)
	}
	for _, s := range g.Sockets {
		e.socket(s)
	}
	if s := g.Serial; s != nil {
		e.replace(s.ID, "stdio,id="+s.ID+",signal=off")
	}
	for _, r := range g.Rings {
		e.replace(r.ID, fmt.Sprintf("ringbuf,id=%s,size=%d", r.ID, r.Size))
	}
	for _, c := range g.Chardevs {
		e.chardev(c)
	}
	if len(g.NICs) > MaxNICs {
		e.fail("%d network interfaces; at most %d can be added", len(g.NICs), MaxNICs)
	}
	for i, n := range g.NICs {
		e.nic(i, n)
	}
	if e.err != nil {
		return nil, e.err
	}
	return append(e.args, e.added...), nil
}

// editor edits arguments. err is the first error.
type editor struct {
	args  []string
	added []string
	fds   []int
	sets  int
	err   error
}

func (e *editor) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format+": %w", append(args, errdefs.ErrFailedPrecondition)...)
	}
}

// fd takes the index of a descriptor in the grant and returns the descriptor's number in this process.
func (e *editor) fd(index int) int {
	if index < 0 || index >= len(e.fds) {
		e.fail("the grant refers to descriptor %d, but has only %d", index, len(e.fds))
		return -1
	}
	return e.fds[index]
}

// set adds a set of descriptors and returns the path under which QEMU can open the set.
func (e *editor) set(indexes ...int) string {
	number := firstSet + e.sets
	e.sets++
	for _, i := range indexes {
		e.added = append(e.added, "-add-fd", fmt.Sprintf("set=%d,fd=%d", number, e.fd(i)))
	}
	return "/dev/fdset/" + strconv.Itoa(number)
}

// values calls the given function with each value of an option, and returns how many values the function replaced.
func (e *editor) values(option string, change func(value string) (string, bool)) (changed int) {
	for i := 0; i+1 < len(e.args); i++ {
		if e.args[i] != option {
			continue
		}
		if value, ok := change(e.args[i+1]); ok {
			e.args[i+1] = value
			changed++
		}
	}
	return changed
}

func (e *editor) file(f File) {
	name := e.set(f.FDs...)
	if n := e.values("-blockdev", func(value string) (string, bool) { return setFile(value, f, name) }); n != 1 {
		e.fail("%d block devices have the file %s, want 1", n, f.Path)
	}
}

// setFile returns a block node with its file replaced, and true. It returns false if the node's path is not the path in
// f.
func setFile(node string, f File, to string) (string, bool) {
	var fields map[string]json.RawMessage
	if json.Unmarshal([]byte(node), &fields) != nil {
		return "", false
	}
	var filename string
	if json.Unmarshal(fields["filename"], &filename) != nil || filename != f.Path {
		return "", false
	}
	fields["filename"] = json.RawMessage(strconv.Quote(to))
	if f.Device {
		fields["driver"] = json.RawMessage(`"host_device"`)
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if encoder.Encode(fields) != nil {
		return "", false
	}
	return strings.TrimSpace(out.String()), true
}

func (e *editor) plain(p Plain) {
	name := "/proc/self/fd/" + strconv.Itoa(e.fd(p.FD))
	whole := func(value string) (string, bool) { return name, value == p.Path }
	part := func(value string) (string, bool) {
		fields := strings.Split(value, ",")
		i := slices.Index(fields, "path="+p.Path)
		if i < 0 {
			return "", false
		}
		fields[i] = "path=" + name
		return strings.Join(fields, ","), true
	}
	below := func(value string) (string, bool) {
		return strings.Replace(value, "unix:"+p.Path+"/", "unix:"+name+"/", 1), strings.Contains(value, "unix:"+p.Path+"/")
	}
	if n := e.values("-kernel", whole) + e.values("-initrd", whole) + e.values("-fsdev", part) + e.values("-vnc", below); n != 1 {
		e.fail("%d options have the path %s, want 1", n, p.Path)
	}
}

func (e *editor) socket(s Plain) {
	end := fmt.Sprintf(",fd=%d", e.fd(s.FD))
	connected := func(value string) (string, bool) {
		begin, found := strings.CutSuffix(value, ",path="+s.Path)
		return begin + end, found && strings.HasPrefix(begin, "socket,")
	}
	if n := e.values("-chardev", connected); n != 1 {
		e.fail("%d sockets have the path %s, want 1", n, s.Path)
	}
}

func (e *editor) chardev(c Chardev) {
	e.replace(c.ID, fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", c.ID, e.fd(c.Socket)))
}

// replace puts a backend in place of the null device with the given ID.
func (e *editor) replace(id, backend string) {
	if n := e.values("-chardev", func(value string) (string, bool) { return backend, value == "null,id="+id }); n != 1 {
		e.fail("%d null devices have the ID %s, want 1", n, id)
	}
}

func (e *editor) nic(i int, n NIC) {
	id := "tripod" + strconv.Itoa(i)
	netdev := fmt.Sprintf("tap,id=%s,fd=%d", id, e.fd(n.Tap))
	if n.VHost != nil {
		netdev += fmt.Sprintf(",vhost=on,vhostfd=%d", e.fd(*n.VHost))
	}
	device := fmt.Sprintf("virtio-net-pci,netdev=%s,id=net-%s,mac=%s,bus=pcie.0,addr=%#x,romfile=", id, id, n.MAC, firstSlot+i)
	if n.MTU != 0 && n.MTU != defaultMTU {
		device += ",host_mtu=" + strconv.Itoa(n.MTU)
	}
	e.added = append(e.added, "-netdev", netdev, "-device", device)
}
