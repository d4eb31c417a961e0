package cgroup

import "cmp"

// Defaults returns its arguments: the cgroup driver, and the parent of pods that name no parent. In place of an empty
// argument, it returns the default value.
func Defaults(driver, parent string) (string, string) {
	driver = cmp.Or(driver, DriverCgroupfs)
	if driver == DriverSystemd {
		return driver, cmp.Or(parent, "tripod.slice")
	}
	return driver, cmp.Or(parent, "/tripod")
}
