package tap

// Frame builders for the tests of the filters.
var (
	UDP4Frame  = udp4Frame
	UDP6Frame  = udp6Frame
	ICMP6Frame = icmp6Frame
)
