package annotations

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	goyaml "go.yaml.in/yaml/v2"
	"k8s.io/apimachinery/pkg/api/resource"
	"libvirt.org/go/libvirtxml"
	"sigs.k8s.io/yaml"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

const (
	maxVCPUs      = 255
	maxRootVolume = 64 << 40
	sectorSize    = 512
	maxScratch    = 8
	maxSSHKeyLine = 16 << 10
)

// The allowed forms of values. objectName matches the name of a Kubernetes object (RFC 1123 subdomain), and dataKey a
// key in a ConfigMap. The pattern quantity limits the exponent N, because the parser of quantities computes 10^N,
// however large N is.
var (
	objectName  = lazyregexp.New(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	dataKey     = lazyregexp.New(`^[-._a-zA-Z0-9]{1,253}$`)
	cpuModel    = lazyregexp.New(`^[A-Za-z0-9][-._A-Za-z0-9]{0,63}$`)
	scratchPath = lazyregexp.New(`^/dev/[-._a-zA-Z0-9/]{1,100}$`)
	uuidText    = lazyregexp.New(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	quantity    = lazyregexp.New(`^\+?[0-9]{1,20}(\.[0-9]{0,20})?([KMGTPE]i|[mkMGTPE]|[eE][+-]?[0-9]{1,2})?$`)
)

func setVCPUs(o *Options, value string) error {
	n, err := strconv.ParseUint(value, 10, 16)
	if err != nil || n == 0 || n > maxVCPUs {
		return errors.New("not a number of CPUs")
	}
	o.VCPUs, o.VCPUsSet = int(n), true
	return nil
}

func setCPUModel(o *Options, value string) error {
	if !cpuModel().MatchString(value) {
		return errors.New("not the name of a CPU model")
	}
	o.CPUModel = value
	return nil
}

// setLibvirtCPU converts YAML to XML. As in Virtlet, the YAML has the field names of Go's libvirtxml.
func setLibvirtCPU(o *Options, value string) error {
	if len(value) > maxText {
		return errTooLong
	}
	if strings.Contains(strings.ToLower(value), "xmlname") {
		return errors.New("XMLName is not a field of <cpu>")
	}
	var cpu libvirtxml.DomainCPU
	if err := yaml.UnmarshalStrict([]byte(value), &cpu); err != nil {
		return err
	}
	text, err := xml.Marshal(cpu)
	if err != nil {
		return err
	}
	o.LibvirtCPU = string(text)
	return nil
}

func setSystemUUID(o *Options, value string) error {
	lower := strings.ToLower(value)
	if !uuidText().MatchString(lower) {
		return errors.New("not a UUID")
	}
	// libvirt refuses a UUID whose digits are all the same, and guests treat such a UUID as missing.
	if strings.Trim(lower, lower[:1]+"-") == "" {
		return errors.New("a UUID whose digits are all the same")
	}
	o.SystemUUID = lower
	return nil
}

func setRootVolumeSize(o *Options, value string) (err error) {
	o.RootVolumeSize, err = diskSize(value)
	return err
}

// diskSize parses the size of a disk and rounds it up to whole sectors.
func diskSize(value string) (uint64, error) {
	if !quantity().MatchString(value) {
		return 0, errors.New("not a quantity")
	}
	q, err := resource.ParseQuantity(value)
	if err != nil {
		return 0, err
	}
	if q.CmpInt64(1) < 0 || q.CmpInt64(maxRootVolume) > 0 {
		return 0, errors.New("out of range")
	}
	size := q.Value() // rounded up
	if q.CmpInt64(size) != 0 {
		return 0, errors.New("not a whole number of bytes")
	}
	return (uint64(size) + sectorSize - 1) / sectorSize * sectorSize, nil
}

func setScratchDisks(o *Options, value string) error {
	seen := map[string]bool{}
	for _, item := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == '\n' }) {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		at, size, _ := strings.Cut(item, "=")
		if !scratchPath().MatchString(at) || path.Clean(at) != at || seen[at] {
			return fmt.Errorf("%q is not a path of a disk, or is used twice", at)
		}
		bytes, err := diskSize(size)
		if err != nil {
			return fmt.Errorf("size of %s: %w", at, err)
		}
		seen[at] = true
		o.ScratchDisks = append(o.ScratchDisks, ScratchDisk{Path: at, Size: bytes})
	}
	if len(o.ScratchDisks) > maxScratch {
		return fmt.Errorf("%d disks are too many", len(o.ScratchDisks))
	}
	return nil
}

func setSSHKeys(o *Options, value string) (err error) {
	o.SSHKeys, err = SSHKeys(value)
	return err
}

// SSHKeys returns the lines of an authorized_keys file, without empty lines and comments.
func SSHKeys(text string) ([]string, error) {
	if len(text) > maxText {
		return nil, errTooLong
	}
	var keys []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
			continue
		case len(line) > maxSSHKeyLine:
			return nil, fmt.Errorf("a line is longer than %d bytes", maxSSHKeyLine)
		case !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return unicode.IsControl(r) && r != '\t' }):
			return nil, errors.New("a line has control characters or invalid UTF-8")
		}
		keys = append(keys, line)
	}
	return keys, nil
}

// parseSource parses a reference of the form KIND/NAME or, if withKey is true, also of the form KIND/NAME/KEY.
func parseSource(value string, withKey bool) (Source, error) {
	parts := strings.Split(value, "/")
	if len(parts) != 2 && (!withKey || len(parts) != 3) {
		return Source{}, errors.New("not a reference")
	}
	s := Source{Kind: strings.ToLower(parts[0]), Name: parts[1]}
	switch {
	case s.Kind != "configmap" && s.Kind != "secret":
		return Source{}, fmt.Errorf("%q is neither a ConfigMap nor a Secret", parts[0])
	case len(s.Name) > 253 || !objectName().MatchString(s.Name):
		return Source{}, fmt.Errorf("%q cannot be the name of a ConfigMap or Secret", s.Name)
	}
	if len(parts) == 3 {
		s.Key = parts[2]
		if !dataKey().MatchString(s.Key) || s.Key == "." || strings.HasPrefix(s.Key, "..") {
			return Source{}, fmt.Errorf("%q cannot be a key", s.Key)
		}
	}
	return s, nil
}

// Mapping parses a mapping in YAML or JSON. Numbers become json.Number, exactly as written. Duplicate keys are an
// error. For an empty text, the result is nil.
func Mapping(text string) (map[string]any, error) {
	if len(text) > maxText {
		return nil, errTooLong
	}
	v, err := Value(text)
	if err != nil {
		return nil, err
	}
	m, ok := v.(map[string]any)
	if !ok && v != nil {
		return nil, errors.New("not a mapping")
	}
	return m, nil
}

// Value is like Mapping, but parses a value of any type.
func Value(text string) (any, error) {
	asJSON, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		return nil, err
	}
	// encoding/json writes an escape for bytes that are not text, which only YAML's !!binary yields.
	if bytes.Contains(bytes.ReplaceAll(asJSON, []byte(`\\`), nil), []byte(`\ufffd`)) {
		return nil, errors.New("!!binary is not text; for a file, use `encoding: b64`")
	}
	if err := oneDocument(text); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(asJSON))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	return v, nil
}

// oneDocument fails if there is anything in YAML after the first document.
func oneDocument(text string) error {
	d := goyaml.NewDecoder(strings.NewReader(text))
	for first := true; ; first = false {
		var v any
		switch err := d.Decode(&v); {
		case errors.Is(err, io.EOF):
			return nil
		case !first && (err != nil || v != nil):
			return errors.New("more than one YAML document")
		case err != nil:
			return err
		}
	}
}
