package delegate

import (
	"errors"
	"log/slog"
	"maps"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// memory is a Record in memory, which can refuse writes.
type memory struct {
	kinds map[string]map[string][]byte
	err   error
}

func (m *memory) All(kind string, each func(string, []byte) error) error {
	for k, v := range m.kinds[kind] {
		if err := each(k, v); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Update(kind string, put map[string][]byte, remove []string) error {
	if m.err != nil {
		return m.err
	}
	if m.kinds[kind] == nil {
		m.kinds[kind] = map[string][]byte{}
	}
	maps.Copy(m.kinds[kind], put)
	for _, k := range remove {
		delete(m.kinds[kind], k)
	}
	return nil
}

func testOwners(t *testing.T, m *memory, names ...string) (*owners, map[string]*endpoint) {
	t.Helper()
	var endpoints []*endpoint
	named := map[string]*endpoint{}
	for _, name := range names {
		e, err := newEndpoint(Endpoint{Name: name, Runtime: "/none", Images: "/none"}, 1<<20, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.close() })
		endpoints, named[name] = append(endpoints, e), e
	}
	o, err := openOwners(m, endpoints, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return o, named
}

func pods(ids ...string) []proto.Message {
	var all []proto.Message
	for _, id := range ids {
		all = append(all, &runtimeapi.PodSandbox{Id: id, Metadata: &runtimeapi.PodSandboxMetadata{Uid: "uid-" + id}})
	}
	return all
}

func TestOwnersLearnAndForget(t *testing.T) {
	m := &memory{kinds: map[string]map[string][]byte{}}
	o, e := testOwners(t, m, "a", "b")
	o.learn(e["a"], podList, pods("aa1", "aa2"), 0, true)
	o.learn(e["b"], podList, pods("bb1"), 0, true)
	o.learn(e["a"], containerList, []proto.Message{&runtimeapi.Container{Id: "cc1", PodSandboxId: "aa1"}}, 0, true)
	if _, entry, err := o.find("bb"); err != nil || entry == nil || entry.endpoint != e["b"] {
		t.Errorf("owner of the prefix bb: got %v, %v; want b", entry, err)
	}
	if _, _, err := o.find("aa"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("owner of an ambiguous prefix: got error %v, want InvalidArgument", err)
	}
	if o.ofUID("uid-aa2") != e["a"] || o.podOf("cc1") != "aa1" {
		t.Errorf("owner by UID %v, pod of a container %q; want a and aa1", o.ofUID("uid-aa2"), o.podOf("cc1"))
	}
	o.add(map[string]*owner{"aa3": {endpoint: e["a"], since: 5}})
	o.learn(e["a"], podList, pods("aa2"), 4, true) // requested before aa3 was made
	for id, known := range map[string]bool{"aa1": false, "aa2": true, "aa3": true, "bb1": true, "cc1": true} {
		if _, entry, _ := o.find(id); (entry != nil) != known {
			t.Errorf("owner of %s: got %v, want known %v", id, entry, known)
		}
	}
	o.remove("aa2")

	again, e := testOwners(t, m, "a", "b")
	for id, endpoint := range map[string]*endpoint{"aa2": nil, "aa3": e["a"], "bb1": e["b"], "cc1": e["a"]} {
		if _, entry, _ := again.find(id); (entry == nil) != (endpoint == nil) || entry != nil && entry.endpoint != endpoint {
			t.Errorf("owner of %s after a restart: got %v, want %v", id, entry, endpoint)
		}
	}
	fewer, _ := testOwners(t, m, "a")
	if _, entry, _ := fewer.find("bb1"); entry != nil || len(m.kinds[kindOwner]) != 2 {
		t.Errorf("after b was removed from the configuration: owner of bb1 %v, record %v", entry, m.kinds[kindOwner])
	}
}

func TestOwnersOfADiskThatIsFull(t *testing.T) {
	m := &memory{kinds: map[string]map[string][]byte{}, err: errors.New("disk full")}
	o, e := testOwners(t, m, "a")
	o.learn(e["a"], podList, pods("aa1"), 0, true)
	if _, entry, _ := o.find("aa1"); entry == nil {
		t.Error("the owner is unknown, want it known until the daemon ends")
	}
	if o.isListed(e["a"]) {
		t.Error("the endpoint counts as listed, want only what is on disk")
	}
}

func TestDamagedOwners(t *testing.T) {
	for _, kind := range []string{kindOwner, kindEndpoint} {
		m := &memory{kinds: map[string]map[string][]byte{kind: {"x": []byte("{")}}}
		if _, err := openOwners(m, nil, slog.New(slog.DiscardHandler)); !errdefs.IsDataLoss(err) {
			t.Errorf("%s: got error %v, want DataLoss", kind, err)
		}
	}
}
