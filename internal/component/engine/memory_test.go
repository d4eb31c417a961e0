package engine

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
)

// scribbler returns a server whose memory has 4 pages of 64 KiB after its prepare, which fills two ranges with data. Its handle
// does nothing: the test changes the memory itself, as any instruction of a guest could.
func scribbler() []byte {
	var prepare bin
	fill := func(at, value, n int32) { prepare.i32(at).i32(value).i32(n).u8(0xfc, 11, 0) } // memory.fill
	prepare.i32(2).u8(0x40, 0, 0x1a)                                                       // grow
	fill(8192, 0xaa, 70_000)
	fill(200_000, 0xbb, 5)
	prepare.zeroResult()
	return snapshotModule(prepare)
}

// TestMemoryIsReset checks that each instance begins with exactly the memory of the snapshot, whatever the instances before
// it have done to theirs: changed single bytes, changed pages to what they were, changed more than a warm memory keeps,
// read everything, grown, and ended by a kill. So it is with and without a kernel that finds changed pages, and with
// a snapshot that is closed meanwhile.
func TestMemoryIsReset(t *testing.T) {
	for name, find := range map[string]bool{"found": true, "not found": false} {
		t.Run(name, func(t *testing.T) {
			e, account := testEngine(t), NewAccount(0)
			needPages(t)
			defer findPages(findPages(find))
			c, first := prepared(t, e, scribbler(), InstanceOptions{Account: account})
			s := captured(t, first)
			want := bytes.Clone(first.ownMemory())
			random := rand.New(rand.NewPCG(1, 2))
			for n := range 60 {
				i := instance(t, c, InstanceOptions{Snapshot: s, Account: account})
				got := i.ownMemory()
				if !bytes.Equal(got, want) {
					t.Fatalf("instance %d begins with another memory than the snapshot (%d bytes, want %d)", n, len(got), len(want))
				}
				handled(t, c, i, 2, 9*1000+7) // the globals and the table, too
				scribble(t, i, n, random)
				if n%7 == 3 {
					i.Kill()
				}
				i.Close()
			}
			if held := account.Held(HeldBytes); held > maxKept || find && held == 0 {
				t.Errorf("the memory that waits for an instance holds %d bytes", held)
			}
			s.Close()
			if held := account.Held(HeldBytes); held != 0 {
				t.Errorf("a closed snapshot holds %d bytes", held)
			}
		})
	}
}

// TestInitialMemoryIsReset checks the same for guests without snapshots, whose instances begin as the guest was built: by a
// plan of several core modules, and by one.
func TestInitialMemoryIsReset(t *testing.T) {
	needPages(t)
	for _, byPlan = range []bool{true, false} {
		c, account := theGuest(t), NewAccount(0)
		s, err := c.Initial(account)
		if s == nil || err != nil {
			t.Fatalf("by a plan: %v: Initial = %v, %v; want a snapshot", byPlan, s, err)
		}
		count, random := bound(t, "count"), rand.New(rand.NewPCG(1, 2))
		want := bytes.Clone(instance(t, c, InstanceOptions{Host: &things{}}).ownMemory())
		for n := range 30 {
			i := instance(t, c, InstanceOptions{Host: &things{}, Snapshot: s, Account: account})
			if got := i.ownMemory(); !bytes.Equal(got, want) {
				t.Fatalf("by a plan: %v: instance %d begins with another memory than the guest's (%d bytes, want %d)", byPlan, n, len(got), len(want))
			}
			if out, err := i.Call(t.Context(), count, nil, nil); err != nil || string(out) != string(u32s(1)) {
				t.Errorf("count() = %x, %v; want 1", out, err)
			}
			scribble(t, i, n, random)
			i.Close()
		}
		if account.Held(HeldBytes) == 0 {
			t.Error("no memory waits for an instance")
		}
		s.Close()
		if held := account.Held(HeldBytes); held != 0 {
			t.Errorf("a closed snapshot holds %d bytes", held)
		}
	}
}

// scribble changes the memory of an instance in a way that depends on n.
func scribble(t *testing.T, i *Instance, n int, random *rand.Rand) {
	t.Helper()
	mem := i.ownMemory()
	switch n % 5 {
	case 0: // single bytes
		for range random.IntN(50) {
			mem[random.IntN(len(mem))] ^= byte(1 + random.IntN(255))
		}
	case 1: // everything
		for at := range mem {
			mem[at] = byte(n + at)
		}
	case 2: // to what it is, which copies pages
		for at := 0; at < len(mem); at += pageBytes {
			mem[at] |= 0
		}
		mem[len(mem)-1] = 1
	case 3: // beyond the size of the snapshot
		if err := i.growMemory(3); err != nil {
			t.Fatal(err)
		}
		for at := range i.ownMemory() {
			i.ownMemory()[at] = 0xcc
		}
	case 4: // reads only
		sum := 0
		for _, b := range mem {
			sum += int(b)
		}
		if sum == 0 {
			t.Error("an empty memory")
		}
	}
}

// needPages skips a test on a kernel that does not find changed pages.
func needPages(t *testing.T) {
	t.Helper()
	if was := findPages(true); !findPages(was) {
		t.Skip("the kernel has no PAGEMAP_SCAN (Linux 6.7)")
	}
}

func captured(t *testing.T, i *Instance) *Snapshot {
	t.Helper()
	s, err := i.Capture(0, false, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// TestWarmMemoriesAreBounded checks that a snapshot keeps at most a number of memories, and no more bytes of them than its
// pod's account allows, and that it gives them back when it closes, also those that are still in use then.
func TestWarmMemoriesAreBounded(t *testing.T) {
	e, err := New(Config{Instances: 1, Overflow: maxWarm + 10})
	if err != nil {
		t.Fatal(err)
	}
	needPages(t)
	account := NewAccount(0)
	c, first := prepared(t, e, scribbler(), InstanceOptions{Account: account})
	s := captured(t, first)
	var all []*Instance
	begin := func(n int) {
		for range n {
			i := instance(t, c, InstanceOptions{Snapshot: s, Account: account})
			i.ownMemory()[0] = 1
			all = append(all, i)
		}
	}
	end := func() {
		for _, i := range all {
			i.Close()
		}
		all = nil
	}
	begin(maxWarm + 5)
	end()
	if n := s.warm(); n != maxWarm {
		t.Errorf("%d memories wait for instances, want %d", n, maxWarm)
	}
	if held := account.Held(HeldBytes); held < maxWarm*pageBytes || held > maxWarm*4*pageBytes {
		t.Errorf("they hold %d bytes; want a few pages each", held)
	}
	begin(maxWarm)
	account.Bound(HeldBytes, 16*pageBytes)
	end()
	if held := account.Held(HeldBytes); held == 0 || held > 4*pageBytes {
		t.Errorf("they hold %d bytes, beyond a quarter of the limit of the account", held)
	}
	begin(3)
	s.Close()
	end()
	if held := account.Held(HeldBytes); held != 0 {
		t.Errorf("after the snapshot, memories hold %d bytes", held)
	}
}

// TestWarmMemoriesOfAllSnapshots checks that the memories of all snapshots that wait for instances have a common bound, which
// closed snapshots do not count for.
func TestWarmMemoriesOfAllSnapshots(t *testing.T) {
	e, err := New(Config{Instances: 1, Overflow: maxWarm + 10})
	if err != nil {
		t.Fatal(err)
	}
	needPages(t)
	warm := func(s *Snapshot, c *Code) int {
		all := make([]*Instance, maxWarm)
		for k := range all {
			all[k] = instance(t, c, InstanceOptions{Snapshot: s})
		}
		for _, i := range all {
			i.Close()
		}
		return s.warm()
	}
	for range 2 {
		c, first := prepared(t, e, scribbler(), InstanceOptions{})
		var snapshots []*Snapshot
		sum := 0
		for range maxAllWarm/maxWarm + 1 {
			s := captured(t, first)
			sum, snapshots = sum+warm(s, c), append(snapshots, s)
		}
		if sum != maxAllWarm {
			t.Errorf("%d memories wait for instances, want %d", sum, maxAllWarm)
		}
		for _, s := range snapshots {
			s.Close()
		}
	}
}

// TestNoMemoryBeforeTheLimit checks that the initial memory of a code is not made for an instance that may not have as much.
func TestNoMemoryBeforeTheLimit(t *testing.T) {
	c := loaded(t, testEngine(t), scribbler())
	made := func() bool {
		l, err := c.linked(c.path, c.pooled(c.path))
		if err != nil {
			t.Fatal(err)
		}
		return l.memory == nil
	}
	if i, err := c.Instantiate(t.Context(), InstanceOptions{MaxMemory: 1}); !errors.Is(err, ErrMemory) || i != nil || made() {
		t.Errorf("Instantiate = %v, %v; the initial memory was made: %v", i, err, made())
	}
	if instance(t, c, InstanceOptions{}); !made() {
		t.Error("the initial memory was not made")
	}
}

// TestSnapshotsSideBySide checks that instances of several snapshots never see the memory of another one while all of them
// come and go in many threads.
func TestSnapshotsSideBySide(t *testing.T) {
	e, err := New(Config{Instances: 1, Overflow: 100})
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for value := range byte(4) {
		var prepare bin
		prepare.i32(4096).i32(int32(value)+1).i32(100_000).u8(0xfc, 11, 0).zeroResult()
		c, first := prepared(t, e, snapshotModule(prepare), InstanceOptions{})
		want, s := string(first.ownMemory()), captured(t, first)
		for range 4 {
			group.Go(func() {
				for n := range 100 {
					i, err := c.Instantiate(t.Context(), InstanceOptions{Snapshot: s})
					if err != nil {
						t.Error(err)
						return
					}
					if string(i.ownMemory()) != want {
						t.Errorf("instance %d of snapshot %d begins with another memory", n, value)
					}
					for at := int(value); at < len(want); at += 5000 {
						i.ownMemory()[at] = ^value
					}
					i.Close()
				}
			})
		}
	}
	group.Wait()
}
