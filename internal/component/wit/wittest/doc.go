// Package wittest makes random types and values, for tests that compare implementations of the flat encoding or of the
// canonical ABI. Only tests import it.
package wittest
