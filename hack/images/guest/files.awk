# Turns the write_files of a cloud-config that is JSON, a field a line, into a shell script that writes them. Known are path,
# content, permissions and the encoding b64. Strings are unescaped by printf's %b, which does not know an escaped quote.
function value(s) { sub(/^ *"[a-z]+": "/, "", s); sub(/",?$/, "", s); gsub(/\\"/, "\"", s); return s }
function quote(s) { gsub(/'/, "'\\''", s); return "'" s "'" }
/^  "write_files": \[/ { inside = 1; next }
/^  \]/ { inside = 0 }
!inside { next }
/^    \{/ { path = content = encoding = ""; mode = "0644" }
/^      "path": / { path = value($0) }
/^      "content": / { content = value($0) }
/^      "encoding": / { encoding = value($0) }
/^      "permissions": / { mode = value($0) }
/^    \}/ {
  print "p=$(printf %b " quote(path) ") && mkdir -p \"${p%/*}\""
  print "printf %b " quote(content) (encoding == "b64" ? " | base64 -d" : "") " >\"$p\"; chmod " mode " \"$p\""
}
