package protowit

import (
	"strconv"
	"strings"
	"unicode"
)

// kebab returns the WIT name for a protobuf identifier: lower-case words joined by hyphens. A word begins after an
// underscore or a dot. It also begins at an upper-case letter that follows a lower-case letter or a digit (fooBar,
// v2Beta), and at the last of several upper-case letters if a lower-case letter follows (HTTPServer). Words in WIT
// begin with a letter, so digits belong to the previous word: foo_2 becomes foo2.
func kebab(identifier string) string {
	var b strings.Builder
	runes := []rune(identifier)
	boundary := false
	for i, r := range runes {
		if r == '_' || r == '.' {
			boundary = true
			continue
		}
		if unicode.IsUpper(r) && i > 0 && runes[i-1] != '_' && runes[i-1] != '.' {
			boundary = !unicode.IsUpper(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])
		}
		switch {
		case b.Len() == 0 && unicode.IsDigit(r):
			b.WriteByte('x')
		case b.Len() > 0 && boundary && !unicode.IsDigit(r):
			b.WriteByte('-')
		}
		boundary = false
		b.WriteRune(unicode.ToLower(r))
	}
	if b.Len() == 0 {
		return "x" // the identifier consists of underscores only
	}
	return b.String()
}

// scope assigns names that are unique in one WIT namespace.
type scope map[string]bool

// name assigns the wanted name if it is free. Otherwise it assigns the first free name of wanted-x2, wanted-x3 and so
// on.
func (s scope) name(wanted string) string {
	name := wanted
	for n := 2; s[name]; n++ {
		name = wanted + "-x" + strconv.Itoa(n)
	}
	s[name] = true
	return name
}

// keywords are the keywords of WIT and its drafts. An identifier that is a keyword needs a % prefix.
var keywords = func() map[string]bool {
	all := make(map[string]bool)
	for _, w := range strings.Fields(`as async bool borrow char constructor enum error-context export external f32 f64
		flags float32 float64 from func future import include interface list map option own package record resource
		result s16 s32 s64 s8 static stream string tuple type u16 u32 u64 u8 union use variant with world`) {
		all[w] = true
	}
	return all
}()

// ident returns a name as WIT text. If the name is a keyword, ident adds a % prefix.
func ident(name string) string {
	if keywords[name] {
		return "%" + name
	}
	return name
}

// enumPrefix returns the prefix that all values of an enum have by convention. The prefix is the enum's name (COLOR_ in
// the enum Color). enumPrefix returns "" unless every value has the prefix and the rest of each value is a valid name.
func enumPrefix(enum string, values []string) string {
	prefix := strings.ToUpper(strings.ReplaceAll(kebab(enum), "-", "_")) + "_"
	for _, v := range values {
		rest, ok := strings.CutPrefix(v, prefix)
		if !ok || rest == "" || !unicode.IsLetter(rune(rest[0])) {
			return ""
		}
	}
	return prefix
}
