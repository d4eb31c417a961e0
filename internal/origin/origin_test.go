package origin

import (
	"testing"

	"github.com/containerd/errdefs"
)

func TestCheck(t *testing.T) {
	for _, valid := range []string{
		"*", "https://app.example.com", "http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:8080",
		"https://*.example.com", "https://*.example.com:8443", "capacitor://localhost", "https://xn--bcher-kva.example",
	} {
		if err := Check(valid); err != nil {
			t.Errorf("Check(%q) = %v, want nil", valid, err)
		}
	}
	for _, invalid := range []string{
		"", "null", "app.example.com", "https://", "https://app.example.com/", "https://app.example.com?x", "https://u@app.example.com",
		"https://App.example.com", "https://app.*.com", "https://*", "https://*example.com", "https://*.*.com", "*.example.com", "https://*.",
		"http://app.example.com:80", "https://app.example.com:443", "https://app.example.com:x", "https://bücher.example", "https://a b", "**",
	} {
		if err := Check(invalid); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Check(%q) = %v, want ErrInvalidArgument", invalid, err)
		}
	}
}
