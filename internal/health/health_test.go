package health

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

func TestBoard(t *testing.T) {
	var log bytes.Buffer
	b := NewBoard(slog.New(slog.NewTextHandler(&log, nil)))
	b.Report("record", RuntimeReady, "ReadOnly", errors.New("cannot be written"))
	b.Report("images", RuntimeReady, "Damaged", errors.New("is empty"))
	first := b.Problems()
	b.Report("record", RuntimeReady, "ReadOnly", errors.New("cannot be written"))
	if strings.Count(log.String(), "cannot be written") != 1 {
		t.Errorf("a lasting problem must be logged once, but the log is:\n%s", &log)
	}
	all := b.Problems()
	if len(all) != 2 || all[0].Part != "images" || all[1].Reason != "ReadOnly" || !all[1].Since.Equal(first[1].Since) {
		t.Errorf("Problems = %+v, want the same as before: %+v", all, first)
	}
	b.Report("record", RuntimeReady, "", nil)
	b.Report("edge", EdgeReady, "", nil) // never had one
	if all := b.Problems(); len(all) != 1 || all[0].Part != "images" {
		t.Errorf("Problems after one was solved = %+v, want only that of images", all)
	}
	if (*Board)(nil).Problems() != nil {
		t.Error("a nil Board has problems")
	}
}
