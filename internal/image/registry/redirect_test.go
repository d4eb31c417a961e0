package registry

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestRedirectsAreChecked(t *testing.T) {
	request := func(method, to string) *http.Request {
		r := httptest.NewRequest(method, to, nil)
		r.Header.Set("Authorization", "Basic x")
		r.Header.Set("Range", "bytes=1-")
		return r
	}
	from := []*http.Request{request("GET", "https://registry.example:5000/v2/")}
	for _, c := range []struct {
		to            string
		method        string
		refused, bare bool
	}{
		{"https://registry.example:5000/other", "GET", false, false},
		{"https://cdn.registry.example:5000/other", "GET", false, true},
		{"https://registry.example:5001/other", "GET", false, true},
		{"http://registry.example:5000/other", "GET", true, false},
		{"https://other.example/", "POST", true, false},
	} {
		to := request(c.method, c.to)
		to.Response = &http.Response{TLS: &tls.ConnectionState{}}
		err := CheckRedirect(to, from)
		if (err != nil) != c.refused || err == nil && (to.Header.Get("Authorization") == "") != c.bare || to.Header.Get("Range") == "" {
			t.Errorf("%s %s: got error %v and headers %v", c.method, c.to, err, to.Header)
		}
	}
	if err := CheckRedirect(request("GET", "https://registry.example:5000/"), make([]*http.Request, maxRedirects)); err == nil {
		t.Error("checkRedirect accepted an endless redirect")
	}
}
