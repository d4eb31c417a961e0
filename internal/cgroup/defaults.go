package cgroup

import "cmp"

// Defaults returns the cgroup driver and the default parent of pods. Empty arguments get their defaults.
func Defaults(driver, parent string) (string, string) {
	driver = cmp.Or(driver, DriverCgroupfs)
	if driver == DriverSystemd {
		return driver, cmp.Or(parent, "tripod.slice")
	}
	return driver, cmp.Or(parent, "/tripod")
}
