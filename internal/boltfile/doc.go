// Package boltfile opens bbolt files so that a damaged one is refused and never taken for a new one. It owns how such a file is
// made, looked at and opened; what is in it is its callers'. All files of bbolt that the programs keep are opened by it.
//
// A file is made under another name and renamed, so that it is there as a whole or not at all: one that is empty or cut off has
// lost its content. Before it is opened for writing it is read in whole, which finds pages that would end the process later.
package boltfile
