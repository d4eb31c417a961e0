# Converts the write_files of a cloud-config in JSON, with one field per line, to a shell script that writes the files. It
# supports path, content, permissions and the encoding b64. printf's %b unescapes strings, except for escaped quotes.
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
