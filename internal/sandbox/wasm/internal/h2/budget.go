package h2

import "time"

const (
	// budgetBurst is how many useless frames a client can send at once, and budgetRate how many per second in the long
	// run. nghttp2 and Node.js bound resets in the same way (1000 and 33).
	budgetBurst = 1000
	budgetRate  = 100
	// updatesEarned bounds how many WINDOW_UPDATE frames a client can have earned.
	updatesEarned = 1 << 20
)

// budget bounds the frames of a connection that cost work and ask for nothing. Each of them spends one; answers and data
// give some back, so a client can send as many as it likes beside real work: grpc-go pings for each message that it gets
// while it measures the bandwidth.
type budget struct {
	spent  int
	earned int       // how far earn can go below 0
	since  time.Time // spent was reduced for the time until then; the connection's start at first
}

// spend reports whether the client can have one more useless frame.
func (b *budget) spend() bool {
	b.spent++
	if b.spent <= budgetBurst {
		return true
	}
	now := time.Now()
	if refill := int(now.Sub(b.since).Seconds() * budgetRate); refill > 0 {
		b.spent = max(b.spent-refill, 0)
		b.since = now
	}
	return b.spent <= budgetBurst
}

// earn gives back what n frames cost.
func (b *budget) earn(n int) { b.spent = max(b.spent-n, min(b.spent, -b.earned)) }
