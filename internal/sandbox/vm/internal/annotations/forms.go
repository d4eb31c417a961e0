package annotations

import (
	"errors"
	"fmt"
	"mime"
	"net/mail"
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// Document is user-data in a form of cloud-init's that cannot be merged with a mapping, such as a script. The zero value
// is no document.
type Document struct {
	// Text is the user-data, exactly as given.
	Text string
	// ContentType is cloud-init's MIME type for the form. It is empty if Text is a MIME message with a header of its own.
	ContentType string
	// Configures means that the text can yield a cloud-config in the guest, whose keys replace other keys there.
	Configures bool
}

// form is a form of user-data. cloud-init finds it by the beginning of the text.
type form struct {
	// start is the beginning, in lower case.
	start, contentType string
	configures         bool
	// first means that cloud-init cannot use the text if there is white space before the beginning.
	first bool
	// rendered means that a template can yield the form.
	rendered bool
}

const cloudConfig = "text/cloud-config"

// forms are the forms of cloud-init 22.4 (handlers/__init__.py). If two forms match, the first one applies.
var forms = []form{
	{start: "#cloud-config-archive", contentType: "text/cloud-config-archive", configures: true},
	{start: "#cloud-config-jsonp", contentType: "text/cloud-config-jsonp"},
	{start: "#cloud-config", contentType: cloudConfig, configures: true, rendered: true},
	{start: "#cloud-boothook", contentType: "text/cloud-boothook", first: true, rendered: true},
	{start: "#include-once", contentType: "text/x-include-once-url", configures: true},
	{start: "#include", contentType: "text/x-include-url", configures: true},
	{start: "#part-handler", contentType: "text/part-handler"},
	{start: "#!", contentType: "text/x-shellscript", first: true, rendered: true},
}

// template is the first line of a template. anyTemplate matches first lines that look similar.
const template = "## template: jinja"

var anyTemplate = lazyregexp.New(`^##\s*template:`)

// beginning returns what cloud-init looks at to find the form of a text: the text in lower case, without white space
// before it.
func beginning(text string) string {
	return strings.ToLower(strings.TrimSpace(strings.TrimPrefix(text, byteOrderMark)))
}

const byteOrderMark = "\ufeff"

// formOf returns the form of a text that is neither a template nor a MIME message. It returns nil if the text begins
// like no form.
func formOf(text string) *form {
	start := beginning(text)
	for i := range forms {
		if strings.HasPrefix(start, forms[i].start) {
			return &forms[i]
		}
	}
	return nil
}

// mimeVersion is the field by which cloud-init finds MIME messages.
const mimeVersion = "mime-version:"

// isMIME reports whether the text is meant to be a MIME message, although cloud-init may not take it for one.
func isMIME(text string) bool { return hasField(text, mimeVersion, "content-type:") }

// hasField reports whether the text begins with a header that has one of the fields.
func hasField(text string, fields ...string) bool {
	for line := range strings.Lines(beginning(text)) {
		switch {
		case slices.ContainsFunc(fields, func(field string) bool { return strings.HasPrefix(line, field) }):
			return true
		case strings.TrimSpace(line) == "", strings.HasPrefix(line, "#"):
			return false
		}
	}
	return false
}

// IsDocument reports whether cloud-init would take the text for a whole document because of its beginning. A mapping of HTTP headers is
// none.
func IsDocument(text string) bool {
	return formOf(text) != nil || anyTemplate().MatchString(beginning(text)) || hasField(text, mimeVersion)
}

// setUserData accepts all forms of user-data. A cloud-config and a mapping without any first line become UserData.
func setUserData(o *Options, value string) (err error) {
	if len(value) > maxText {
		return errTooLong
	}
	f := formOf(value)
	switch {
	case anyTemplate().MatchString(beginning(value)):
		o.UserDataDocument, err = templateDocument(value)
	case f != nil && f.contentType != cloudConfig:
		o.UserDataDocument, err = f.document(value)
	case isMIME(value):
		o.UserDataDocument, err = mimeDocument(value)
	case strings.HasPrefix(value, "H4sI"): // gzip's first bytes in base64
		err = fmt.Errorf("compressed data; put them into a ConfigMap or Secret, and name it with %[1]scloud-init-user-data-source and %[1]scloud-init-user-data-source-key", Prefix)
	default:
		o.UserData, err = Mapping(value)
	}
	return err
}

func (f *form) document(text string) (Document, error) {
	switch {
	case strings.HasPrefix(text, byteOrderMark):
		return Document{}, errors.New("cloud-init does not find the form of a text with a byte order mark; remove the mark")
	case f.first && !strings.HasPrefix(strings.ToLower(text), f.start):
		return Document{}, fmt.Errorf("white space before %s; remove it", f.start)
	}
	return Document{Text: text, ContentType: f.contentType, Configures: f.configures}, nil
}

// templateDocument returns a template. It refuses those that cloud-init ignores with a line in the guest's log.
func templateDocument(text string) (Document, error) {
	line, rest, _ := strings.Cut(text, "\n")
	if strings.TrimRight(strings.ToLower(line), " \t\r") != template {
		return Document{}, fmt.Errorf("a template whose first line is not %q", template)
	}
	if f := formOf(rest); f != nil && !f.rendered || f == nil && isMIME(rest) {
		return Document{}, errors.New("cloud-init makes only #cloud-config, #! and #cloud-boothook from a template")
	}
	return Document{Text: text, ContentType: "text/jinja2", Configures: true}, nil
}

// mimeDocument returns a MIME message. It refuses those that Python would read as a message without parts.
func mimeDocument(text string) (Document, error) {
	message, err := mail.ReadMessage(strings.NewReader(text))
	if err != nil {
		return Document{}, fmt.Errorf("MIME message: %w", err)
	}
	if message.Header.Get("MIME-Version") == "" {
		return Document{}, errors.New("MIME message without the header MIME-Version, by which cloud-init finds messages")
	}
	kind, parameters, err := mime.ParseMediaType(message.Header.Get("Content-Type"))
	if err != nil {
		return Document{}, fmt.Errorf("MIME message: Content-Type: %w", err)
	}
	if boundary := parameters["boundary"]; strings.HasPrefix(kind, "multipart/") &&
		(boundary == "" || !strings.Contains(text, "\n--"+boundary)) {
		return Document{}, errors.New("MIME message of several parts without the boundary that its header names")
	}
	return Document{Text: text, Configures: true}, nil
}

// setMetaData accepts a mapping. All other forms exist only for user-data.
func setMetaData(o *Options, value string) (err error) {
	if f := formOf(value); IsDocument(value) && (f == nil || f.contentType != cloudConfig) {
		return fmt.Errorf("not a mapping; cloud-init knows this form only in user-data (%scloud-init-user-data)", Prefix)
	}
	o.MetaData, err = Mapping(value)
	return err
}
