// Package prose holds the language of comments, messages and documents against a list of phrases that a native reader
// stumbles over. It has no other content: `make lint` runs its test.
package prose
