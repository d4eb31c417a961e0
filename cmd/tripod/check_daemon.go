package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/health"
)

// askTimeout bounds the wait for the daemon's status.
const askTimeout = 5 * time.Second

func checkImages(ctx context.Context, c *config.Config) []health.Finding {
	f := health.Finding{Subject: "images", OK: true, Detail: "all blobs and unpacked layers match their digests"}
	found, _, err := cli.VerifyImages(ctx, c.GRPC.Socket, true)
	if err != nil {
		f.OK, f.Detail, f.Remedy = false, "cannot be verified: "+cli.Explain(err), "start the daemon"
	}
	findings := []health.Finding{f}
	for _, d := range found {
		findings[0].OK, findings[0].Detail = false, fmt.Sprintf("%d damaged parts", len(found))
		findings[0].Remedy = "`tripod images verify` lists all of them; pull the images again"
		remedy := "tripod pull " + strings.Join(d.Names[:min(1, len(d.Names))], "")
		if d.Kind == "container" {
			remedy = "remove the container"
		}
		findings = append(findings, health.Finding{Subject: "image " + d.Kind, Detail: d.ID + ": " + d.Detail, Remedy: remedy})
	}
	return findings
}

// checkDaemon checks the status that a running daemon reports.
func checkDaemon(ctx context.Context, c *config.Config) []health.Finding {
	client, err := cli.Connect(ctx, c.GRPC.Socket, askTimeout)
	if err != nil {
		return nil // the daemon may not be running yet
	}
	defer client.Close(ctx)
	f := health.Finding{Subject: "daemon", OK: true, Detail: "no panics since it was started"}
	resp, err := client.Status(ctx, true)
	if err != nil {
		f.OK, f.Detail, f.Remedy = false, "does not report its status: "+cli.Explain(err), "read the daemon's log"
		return []health.Finding{f}
	}
	var info struct {
		RecoveredPanics map[string]uint64
		NodePlugins     []string
	}
	if err := json.Unmarshal([]byte(resp.GetInfo()["config"]), &info); err != nil {
		f.OK, f.Detail, f.Remedy = false, "its status cannot be read: "+err.Error(), "if the daemon is older than this program, restart it"
		return []health.Finding{f}
	}
	if len(info.RecoveredPanics) > 0 {
		var places []string
		for _, place := range slices.Sorted(maps.Keys(info.RecoveredPanics)) {
			places = append(places, fmt.Sprintf("%s (%d)", place, info.RecoveredPanics[place]))
		}
		f.OK, f.Detail = false, "has recovered panics: "+strings.Join(places, ", ")
		f.Remedy = `report the stacks in its log, at "recovered a panic"`
	}
	findings := []health.Finding{f}
	if len(info.NodePlugins) > 0 {
		findings = append(findings,
			health.Finding{Subject: "node plugins", OK: true, Detail: "connected by NRI: " + strings.Join(info.NodePlugins, ", ")})
	}
	for _, c := range resp.GetStatus().GetConditions() {
		remedy := fmt.Sprintf("fix the reported problem; the daemon notices without a restart (%s)", c.GetReason())
		if c.GetReason() == health.NotInstalled {
			remedy = "fix the reported problem and restart the daemon"
		}
		if !c.GetStatus() {
			findings = append(findings, health.Finding{
				Subject: c.GetType(), Required: c.GetType() == runtimeapi.RuntimeReady || c.GetType() == runtimeapi.NetworkReady,
				Detail: c.GetMessage(), Remedy: remedy,
			})
		}
	}
	return findings
}
