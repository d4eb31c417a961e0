# Converts a network-config of version 2, in block style, to a shell script. It supports match.macaddress, mtu, addresses,
# routes (to, via, metric; on-link is assumed), gateway4, gateway6, nameservers.addresses and .search, and dhcp4.
# The script is empty if no interface has an address.
function value(s) { sub(/^[^:]*:[ ]*/, "", s); gsub(/["']/, "", s); sub(/[ ]+$/, "", s); return s }
function endroute() {
  if (to == "" && via == "") return
  if (to == "" || to == "0.0.0.0/0" || to == "::/0") to = "default"
  family = (via ":" to) ~ /:.*:/ ? "-6 " : ""
  hop = via
  sub(/\/.*/, "", hop)
  if (hop != "") routes = routes "ip " family "route replace " hop " dev $i\n"
  routes = routes "ip " family "route replace " to (hop == "" ? "" : " via " hop) " dev $i" (metric == "" ? "" : " metric " metric) "\n"
  to = via = metric = ""
}
function endnic() {
  endroute()
  if (mac != "" || nic != "") {
    found = mac == "" ? "i=" nic : "for p in /sys/class/net/*; do [ \"$(cat $p/address)\" = " tolower(mac) " ] && i=${p##*/}; done"
    if (addrs != "") {
      print found "\nip link set $i up"
      if (mtu != "") print "ip link set $i mtu " mtu
      printf "%s%s", addrs, routes
      any = 1
    } else if (dhcp == "true") {
      print found "\nnet=dhcp\nip link set $i up\nudhcpc -i $i -q -n -t 20 -T 1 -s /lib/guest/dhcp >/dev/null 2>&1"
      any = 1
    }
  }
  mac = mtu = addrs = routes = dhcp = ""
}
/^[ ]*(#|$)/ { next }
{
  match($0, /^[ ]*/); indent = RLENGTH
  line = substr($0, indent + 1)
  item = sub(/^- */, "", line)
  key = line; sub(/:.*/, "", key); gsub(/["']/, "", key)
}
key == "ethernets" && !item { level = indent; inside = 1; next }
inside && !item && indent <= level { inside = 0 }
!inside { next }
!item && (indent == nicIndent || nicIndent == "") { nicIndent = indent; endnic(); nic = key; section = ""; next }
!item && key ~ /^(addresses|routes|nameservers|search|match)$/ {
  if (key == "nameservers") { ns = indent; section = key }
  else if (ns != "" && indent > ns && section ~ /^(nameservers|dns|domains)$/) section = key == "search" ? "domains" : "dns"
  else { ns = ""; section = key }
  next
}
!item && key == "macaddress" { mac = value(line); next }
!item && key == "mtu" && section != "routes" { mtu = value(line); next }
!item && key == "dhcp4" { dhcp = value(line); next }
!item && key ~ /^gateway[46]$/ { endroute(); via = value(line); endroute(); next }
section == "addresses" && item { gsub(/["']/, "", line); addrs = addrs "ip addr replace " line " dev $i" (line ~ /:/ ? " nodad" : "") "\n"; next }
section == "dns" && item { gsub(/["']/, "", line); dns = dns "nameserver " line "\\n"; next }
section == "domains" && item { gsub(/["']/, "", line); search = search " " line; next }
section == "routes" {
  if (item) endroute()
  if (key == "to") to = value(line)
  if (key == "via") via = value(line)
  if (key == "metric") metric = value(line)
}
END {
  endnic()
  if (any && (dns != "" || search != "")) print "printf '" (search == "" ? "" : "search" search "\\n") dns "' >/etc/resolv.conf"
}
