package stats

import (
	"slices"
	"time"
)

// Sample is one value of a family. Times are in seconds, sizes in bytes.
type Sample struct {
	Family *Family
	Value  float64
	// Labels are the values of Family.Labels.
	Labels []string
}

// Samples are values that were measured at the same time. A value that nobody knows is missing.
type Samples []Sample

// Owner is the pod or container that samples belong to. For a pod, Container and Image are empty.
type Owner struct{ Pod, Namespace, Container, ID, Image string }

// BaseLabels are the labels that every family has first.
var BaseLabels = []string{"pod", "namespace", "container", "id", "image", "name"}

// Labels returns the values of BaseLabels. The label name repeats the ID, as in cAdvisor.
func (o Owner) Labels() []string {
	return []string{o.Pod, o.Namespace, o.Container, o.ID, o.Image, o.ID}
}

// Add adds a value.
func (s *Samples) Add(f *Family, v float64, labels ...string) {
	*s = append(*s, Sample{Family: f, Value: v, Labels: labels})
}

func (s *Samples) count(f *Family, v uint64, labels ...string) { s.Add(f, float64(v), labels...) }

// nanos adds a duration in nanoseconds.
func (s *Samples) nanos(f *Family, v uint64) { s.Add(f, float64(v)/float64(time.Second)) }

// limit adds a limit. If there is none, it adds 0, as cAdvisor does.
func (s *Samples) limit(f *Family, v uint64) {
	if v == Unlimited {
		v = 0
	}
	s.count(f, v)
}

// Replace adds the given samples and removes those of the same families that were there.
func (s *Samples) Replace(with Samples) {
	*s = append(slices.DeleteFunc(*s, func(old Sample) bool { return with.has(old.Family) }), with...)
}

func (s Samples) has(f *Family) bool {
	return slices.ContainsFunc(s, func(x Sample) bool { return x.Family == f })
}

// Samples returns the samples of the figures, without those families that only ReadAll reads.
func (f Figures) Samples() Samples {
	var s Samples
	s.nanos(CPUUsage, f.CPU)
	s[0].Labels = []string{"total"}
	f.Memory.samples(&s)
	for _, p := range []struct {
		pressure         *Pressure
		waiting, stalled *Family
	}{
		{f.PSI.CPU, PressureCPUWaiting, PressureCPUStalled},
		{f.PSI.Memory, PressureMemoryWaiting, PressureMemoryStalled},
		{f.PSI.IO, PressureIOWaiting, PressureIOStalled},
	} {
		if p.pressure != nil {
			s.nanos(p.waiting, p.pressure.Some.Total)
			s.nanos(p.stalled, p.pressure.Full.Total)
		}
	}
	return s
}

func (m Memory) samples(s *Samples) {
	s.count(MemoryUsage, m.Usage)
	s.count(MemoryWorkingSet, m.WorkingSet)
	s.count(MemoryRSS, m.RSS)
	swap := uint64(0)
	if m.Swap != nil {
		swap = m.Swap.Usage
	}
	s.count(MemorySwap, swap)
}
