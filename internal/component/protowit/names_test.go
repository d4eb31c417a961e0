package protowit

import "testing"

func TestKebab(t *testing.T) {
	for identifier, want := range map[string]string{
		"SayHello": "say-hello", "say_hello": "say-hello", "HTTPServer": "http-server", "getURL": "get-url",
		"GetV2Beta": "get-v2-beta", "foo_2": "foo2", "foo2bar": "foo2bar", "s3Bucket": "s3-bucket", "_x": "x",
		"__": "x", "_2": "x2", "a.b.v1": "a-b-v1", "UTF8String": "utf8-string", "X": "x", "fooB": "foo-b", "foo__bar_": "foo-bar",
		"COLOR_RED": "color-red", "Ab_Cd": "ab-cd", "x_1_y": "x1-y",
	} {
		if got := kebab(identifier); got != want {
			t.Errorf("kebab(%q) = %q, want %q", identifier, got, want)
		}
	}
}

func TestScope(t *testing.T) {
	s := make(scope)
	for _, want := range []string{"a", "a-x2", "a-x3"} {
		if got := s.name("a"); got != want {
			t.Errorf(`scope.name("a") = %q, want %q`, got, want)
		}
	}
}

func TestEnumPrefix(t *testing.T) {
	for _, tc := range []struct {
		enum   string
		values []string
		want   string
	}{
		{"Color", []string{"COLOR_UNSPECIFIED", "COLOR_RED"}, "COLOR_"},
		{"HTTPCode", []string{"HTTP_CODE_OK"}, "HTTP_CODE_"},
		{"Color", []string{"COLOR_UNSPECIFIED", "RED"}, ""},
		{"Version", []string{"VERSION_1", "VERSION_2"}, ""},
		{"Color", []string{"COLOR_"}, ""},
	} {
		if got := enumPrefix(tc.enum, tc.values); got != tc.want {
			t.Errorf("enumPrefix(%q, %q) = %q, want %q", tc.enum, tc.values, got, tc.want)
		}
	}
}
