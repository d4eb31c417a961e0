package network

import (
	"os"
	"path/filepath"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// FuzzResult checks that any output of a plugin's ADD leads to an error or a result, never a panic.
func FuzzResult(f *testing.F) {
	for _, seed := range []string{
		`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"interface":0,"address":"10.2.0.2/24"}],"routes":[{"dst":"0.0.0.0/0","gw":"10.2.0.1"}]}`,
		`{"cniVersion":"0.4.0","interfaces":[null],"ips":[{"version":"4","interface":-1,"address":"::ffff:10.2.0.2/24"}],"dns":{}}`,
		`{"cniVersion":"0.2.0","ip4":{"ip":"10.2.0.2/24","routes":[{"dst":"::/0"}]},"ip6":null}`,
		`{"cniVersion":"1.1.0","routes":[{}],"ips":[{}]}`,
		`null`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, output []byte) {
		if checkResult(output) != nil {
			return
		}
		printed, err := create.CreateFromBytes(output)
		if err != nil {
			return
		}
		cni, err := types100.NewResultFromResult(printed)
		if err != nil {
			return
		}
		var r Result
		if r.addRoutes(cni) != nil || r.addInterfaces(cni) != nil {
			return
		}
		for _, ip := range r.IPs {
			if !ip.IsValid() {
				t.Errorf("result %s contains an invalid address", output)
			}
		}
	})
}

// FuzzConfiguration checks that any configuration file leads to an error or to a chain that a record can store.
func FuzzConfiguration(f *testing.F) {
	f.Add([]byte(`{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}`), true)
	f.Add([]byte(`{"cniVersions":["0.4.0","1.1.0"],"name":"n","disableCheck":"true","plugins":[{"type":"x","capabilities":{"a":true}}]}`),
		true)
	f.Add([]byte(`{"name":"n","type":"bridge"}`), false)
	f.Fuzz(func(t *testing.T, data []byte, list bool) {
		file := filepath.Join(t.TempDir(), "10.conf")
		if list {
			file += "list"
		}
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := loadChain(file)
		if err != nil {
			return
		}
		rec, err := newRecord(Attachment{ID: "pod"}, c)
		if err != nil {
			t.Fatalf("newRecord for configuration %s: %v", data, err)
		}
		store := recordStore{dir: filepath.Dir(file)}
		if err := store.put(rec); err != nil {
			t.Fatal(err)
		}
		got, err := store.get("pod")
		if err != nil || string(got.list.Bytes) != string(rec.list.Bytes) || !got.sameRequest(rec) {
			t.Errorf("record for configuration %s = %+v, %v, want %+v", data, got, err, rec)
		}
	})
}
