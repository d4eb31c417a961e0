package stats

import (
	"bytes"
	"slices"
	"testing"
)

func TestParseNumber(t *testing.T) {
	for in, want := range map[string]uint64{
		"0\n": 0, "42": 42, " 42 \n": 42, "max\n": Unlimited, "9223372036854771712\n": Unlimited,
		"18446744073709551615": Unlimited, "4611686018427387903": 1<<62 - 1,
	} {
		if got, ok := parseNumber([]byte(in)); got != want || !ok {
			t.Errorf("parseNumber(%q) = %d, %v, want %d, true", in, got, ok, want)
		}
	}
	for _, in := range []string{"", "\n", "-1", "1 2", "0x10", "1e3", "maximum"} {
		if got, ok := parseNumber([]byte(in)); ok {
			t.Errorf("parseNumber(%q) = %d, true, want false", in, got)
		}
	}
}

func TestParsePressureOff(t *testing.T) {
	for _, in := range []string{"", "\n", "none avg10=1.00\n"} {
		if p := parsePressure([]byte(in)); p != nil {
			t.Errorf("parsePressure(%q) = %+v, want nil", in, p)
		}
	}
}

// FuzzParse checks that the parsers accept any bytes without a panic, do not change them, and return averages in range.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"", "42\n", "max\n", "anon 1\nfile 2\n",
		"some avg10=0.12 avg60=0.05 avg300=0.01 total=123\nfull avg10=NaN total=18446744073709551615\n", ":0 \n8: x=\n \n=",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		before := slices.Clone(in)
		parseNumber(in)
		parsePairs(in, func(key string, _ uint64) {
			if key == "" && !bytes.Contains(in, []byte(" ")) {
				t.Error("parsePairs found an empty key in an input without blanks")
			}
		})
		if p := parsePressure(in); p != nil {
			for _, avg := range []float64{p.Some.Avg10, p.Some.Avg60, p.Some.Avg300, p.Full.Avg10, p.Full.Avg60, p.Full.Avg300} {
				if !(avg >= 0 && avg <= 100) {
					t.Errorf("parsePressure(%q) has an average of %v %%, want 0 to 100", in, avg)
				}
			}
		}
		if !bytes.Equal(before, in) {
			t.Error("a parser changed its input")
		}
	})
}
