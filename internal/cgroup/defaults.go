package cgroup

import "cmp"

// Defaults fills in the driver and the parent of pods that name none, where a configuration leaves them empty.
func Defaults(driver, parent string) (string, string) {
	driver = cmp.Or(driver, DriverCgroupfs)
	if driver == DriverSystemd {
		return driver, cmp.Or(parent, "tripod.slice")
	}
	return driver, cmp.Or(parent, "/tripod")
}
