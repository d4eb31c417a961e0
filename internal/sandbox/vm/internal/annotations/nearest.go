package annotations

import "strings"

// nearest returns the known key that is most similar to the given key, ignoring case.
func nearest(key string) string {
	best, least := "", -1
	for _, a := range Known {
		for _, name := range []string{a.Virtlet, a.Key()} {
			if name == "" || strings.HasPrefix(key, Prefix) != strings.HasPrefix(name, Prefix) {
				continue
			}
			if d := distance(strings.ToLower(key), strings.ToLower(name)); least < 0 || d < least {
				best, least = name, d
			}
		}
	}
	return best
}

// distance returns the Levenshtein distance between two strings. It first cuts them to 317 bytes, the maximum length of
// an annotation key.
func distance(a, b string) int {
	a, b = a[:min(len(a), 317)], b[:min(len(b), 317)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j]+1, row[j+1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
