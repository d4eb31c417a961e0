package readers

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/therootcompany/xz"
)

// maxWindow limits zstd's window and xz's dictionary, in bytes, and thus the memory that unpacking needs. `xz -9` uses
// 64 MiB.
const maxWindow = 128 << 20

// Decompressor returns the decompressor for the name of a compression in media types, or nil.
func Decompressor(compression string) func(io.Reader) (io.ReadCloser, error) {
	return decompressors[compression]
}

var decompressors = map[string]func(io.Reader) (io.ReadCloser, error){
	"gzip": func(r io.Reader) (io.ReadCloser, error) { return gzip.NewReader(r) },
	"zstd": func(r io.Reader) (io.ReadCloser, error) {
		d, err := zstd.NewReader(r, zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	},
	"xz": func(r io.Reader) (io.ReadCloser, error) {
		d, err := xz.NewReader(r, maxWindow)
		if err != nil {
			return nil, err
		}
		return io.NopCloser(d), nil
	},
}

// CompressionOf detects a file's compression by its first bytes (RFC 1952 with deflate, RFC 8878, the .xz file
// format), for files without a media type or suffix.
func CompressionOf(head []byte) string {
	for name, magic := range map[string]string{"gzip": "\x1f\x8b\x08", "zstd": "\x28\xb5\x2f\xfd", "xz": "\xfd7zXZ\x00"} {
		if bytes.HasPrefix(head, []byte(magic)) {
			return name
		}
	}
	if len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.HasPrefix(head[1:], []byte("\x2a\x4d\x18")) { // a skippable frame comes first
		return "zstd"
	}
	return ""
}

// Sniff detects a stream's compression by its first bytes.
func Sniff(r io.Reader) (io.Reader, string) {
	b := bufio.NewReaderSize(r, 64<<10)
	// Four bytes identify gzip and zstd, but not xz, which layers must not use. Ignore an error here, because the next
	// read returns it again.
	head, _ := b.Peek(4)
	return b, CompressionOf(head)
}
