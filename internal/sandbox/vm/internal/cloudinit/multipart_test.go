package cloudinit

import (
	"encoding/base64"
	"io"
	"mime"
	"mime/multipart"
	"net/mail"
	"slices"
	"strings"
	"testing"
)

// TestPartsAreUnchanged: whatever the text, the message has exactly its bytes.
func TestPartsAreUnchanged(t *testing.T) {
	for name, text := range map[string]string{
		"no line break":   "#!/bin/sh",
		"line breaks":     "#!/bin/sh\r\n\n\r\n",
		"not ASCII":       "#!/bin/sh\n# ä\u2028\n",
		"a boundary":      "#!/bin/sh\n--tripod\n--\n",
		"long lines":      "#!/bin/sh\n" + strings.Repeat("x", 10_000),
		"a MIME header":   "#!/bin/sh\n# MIME-Version: 1.0\n",
		"trailing blanks": "#include\nhttp://example.com \n \n",
	} {
		t.Run(name, func(t *testing.T) {
			in := document(text)(t)
			got, types := readParts(t, in)
			want := []string{in.Options.UserDataDocument.ContentType, "text/cloud-config"}
			if len(got) != 2 || got[0] != text || !slices.Equal(types, want) {
				t.Errorf("the parts are %q of the types %q, want %q and the files, of the types %q", got, types, text, want)
			}
		})
	}
}

// readParts returns the texts and the types of the parts in the user-data.
func readParts(t *testing.T, in Input) (texts, types []string) {
	t.Helper()
	image, err := Build(in)
	if err != nil {
		t.Fatal(err)
	}
	_, files := contents(t, image.Bytes)
	message, err := mail.ReadMessage(strings.NewReader(string(files["user-data"])))
	if err != nil {
		t.Fatal(err)
	}
	_, parameters, err := mime.ParseMediaType(message.Header.Get("Content-Type"))
	if err != nil {
		t.Fatal(err)
	}
	r := multipart.NewReader(message.Body, parameters["boundary"])
	for {
		p, err := r.NextPart()
		if err == io.EOF {
			return texts, types
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(base64.NewDecoder(base64.StdEncoding, p))
		if err != nil {
			t.Fatal(err)
		}
		kind, _, err := mime.ParseMediaType(p.Header.Get("Content-Type"))
		if err != nil {
			t.Fatal(err)
		}
		texts, types = append(texts, string(text)), append(types, kind)
	}
}

// TestHeadersInSource: a mapping of HTTP headers is a value, though MIME messages begin with such headers too.
func TestHeadersInSource(t *testing.T) {
	in := base(t, map[string]string{"VirtletCloudInitUserDataSource": "secret/s"})
	in.Mounts = []Mount{{HostPath: volume(t, "secret", "v", map[string]string{"headers": "Content-Type: text/plain\nAccept: text/html\n"}),
		ContainerPath: SourceDir + "/secret/s"}}
	image, err := Build(in)
	if err != nil {
		t.Fatal(err)
	}
	_, files := contents(t, image.Bytes)
	if got := string(files["user-data"]); !strings.Contains(got, `"Content-Type": "text/plain"`) {
		t.Errorf("the user-data are %q, want the headers in them", got)
	}
}
