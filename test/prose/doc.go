// Package prose checks comments, messages and documents for phrases that make a native reader stumble. `make lint` runs
// its test.
package prose
