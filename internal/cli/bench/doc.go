// Package bench owns the measuring of CRI runtimes: `tripod bench cri` and `tripod bench lists` drive any endpoint
// as a kubelet would and report percentiles, so that two runtimes can be compared in one run on one machine.
//
// It measures from outside, through the same client for everybody, and must not import anything of the node. Figures
// of different machines, or of different runs on a shared one, are not to be compared.
package bench
