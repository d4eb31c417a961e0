package harness

import (
	"context"
	"fmt"
	"io"
	"net/http"
)

// Reconnecting is a client that opens a connection for each request.
var Reconnecting = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// Fetch requests a URL and returns the body. An answer without the status 200 is an error.
func Fetch(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}
