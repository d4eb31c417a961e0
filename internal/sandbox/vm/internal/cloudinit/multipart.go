package cloudinit

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// mergeLists makes cloud-init append the lists in a cloud-config to those in the parts before it. Without it, they would
// replace the lists.
const mergeLists = "Merge-Type: list(append)+dict(no_replace,recurse_list)+str()\n"

// part is a part of the user-data.
type part struct {
	// header is the part's header in a MIME message, with a line break after each line. It is empty if text is a MIME
	// message with a header of its own.
	header string
	text   string
}

// configPart returns a cloud-config. The header is empty or mergeLists.
func configPart(data map[string]any, header string) (part, error) {
	text, err := encodeJSON(data)
	if err != nil {
		return part{}, fmt.Errorf("user data: %w", err)
	}
	return part{header: contentType("text/cloud-config") + header, text: "#cloud-config\n" + string(text)}, nil
}

func documentPart(d annotations.Document) part {
	if d.ContentType == "" {
		return part{text: d.Text}
	}
	return part{header: contentType(d.ContentType), text: d.Text}
}

func contentType(t string) string { return "Content-Type: " + t + "; charset=\"utf-8\"\n" }

// joinParts returns user-data with the parts in their order. A single part stays as it is. More parts become a MIME
// multi-part message.
func joinParts(parts []part) []byte {
	if len(parts) == 1 && !parts[0].looksLikeMIME() {
		return []byte(parts[0].text)
	}
	boundary := boundaryOf(parts)
	var s strings.Builder
	fmt.Fprintf(&s, "Content-Type: multipart/mixed; boundary=%q\nMIME-Version: 1.0\n", boundary)
	for _, p := range parts {
		fmt.Fprintf(&s, "\n--%s\n%s", boundary, p.encoded())
	}
	fmt.Fprintf(&s, "\n--%s--\n", boundary)
	return []byte(s.String())
}

// looksLikeMIME reports whether cloud-init would read the text as a MIME message although it is none. cloud-init looks
// for the name of the header anywhere in the first 4096 bytes.
func (p part) looksLikeMIME() bool {
	return p.header != "" && strings.Contains(strings.ToLower(p.text[:min(len(p.text), 4096)]), "mime-version:")
}

// boundaryOf returns a boundary that depends on the texts, so that no text can contain it.
func boundaryOf(parts []part) string {
	hash := sha256.New()
	for _, p := range parts {
		hash.Write([]byte(p.text))
	}
	return fmt.Sprintf("tripod-%x", hash.Sum(nil)[:16])
}

// encoded returns the part with its header. The text is in base64, because cloud-init 22.4 spoils other text than ASCII
// in every other encoding. A part that is a message itself must not be encoded.
func (p part) encoded() string {
	if p.header == "" {
		return p.text
	}
	var s strings.Builder
	s.WriteString("MIME-Version: 1.0\n" + p.header + "Content-Transfer-Encoding: base64\n\n")
	for line := base64.StdEncoding.EncodeToString([]byte(p.text)); line != ""; {
		n := min(len(line), 76)
		s.WriteString(line[:n] + "\n")
		line = line[n:]
	}
	return s.String()
}
