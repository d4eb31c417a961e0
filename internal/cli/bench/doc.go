// Package bench measures CRI runtimes. `tripod bench cri` and `tripod bench lists` drive any endpoint as a kubelet
// would and report percentiles, so that two runtimes can be compared in one run on one machine.
//
// It measures from outside, with the same client for all runtimes, and must not import any package of the node. Results
// from different machines, or from different runs on a shared machine, are not comparable.
package bench
