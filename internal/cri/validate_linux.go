package cri

import (
	"cmp"
	"math"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// validateResources rejects meaningless values. The backend decides which limits the host can enforce.
func validateResources(field string, r *runtimeapi.LinuxContainerResources) error {
	if adj := r.GetOomScoreAdj(); adj < -1000 || adj > 1000 {
		return invalid(field+".oom_score_adj", "%d is not between -1000 and 1000", adj)
	}
	return cmp.Or(
		validateLeast(field+".cpu_period", r.GetCpuPeriod(), 0),
		validateLeast(field+".cpu_quota", r.GetCpuQuota(), -1),
		validateLeast(field+".cpu_shares", r.GetCpuShares(), 0),
		validateLeast(field+".memory_limit_in_bytes", r.GetMemoryLimitInBytes(), -1),
		validateLeast(field+".memory_swap_limit_in_bytes", r.GetMemorySwapLimitInBytes(), -1),
		validateEach(field+".hugepage_limits", r.GetHugepageLimits(), func(field string, h *runtimeapi.HugepageLimit) error {
			if h.GetPageSize() == "" {
				return required(field + ".page_size")
			}
			return nil
		}),
	)
}

// validateLeast rejects values below the given minimum. The minimum is -1 where cgroups use -1 for "no limit".
func validateLeast(field string, n, least int64) error {
	if n < least {
		return invalid(field, "%d is less than %d", n, least)
	}
	return nil
}

func validateSecurityContext(field string, sc *runtimeapi.LinuxContainerSecurityContext) error {
	named := sc.GetRunAsUsername() != ""
	switch {
	case named && sc.GetRunAsUser() != nil:
		return invalid(field+".run_as_username", "must not be set with run_as_user")
	case sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil && !named:
		return invalid(field+".run_as_group", "must not be set without run_as_user or run_as_username")
	}
	return cmp.Or(
		validateContainerNamespaces(field+".namespace_options", sc.GetNamespaceOptions()),
		validateID(field+".run_as_user", sc.GetRunAsUser()),
		validateID(field+".run_as_group", sc.GetRunAsGroup()),
		validateGroups(field, sc.GetSupplementalGroups(), sc.GetSupplementalGroupsPolicy()),
		validateSeccomp(field+".seccomp", sc.GetSeccomp()),
		validateProfile(field+".apparmor", sc.GetApparmor()),
		validateEach(field+".masked_paths", sc.GetMaskedPaths(), validateAbsolute),
		validateEach(field+".readonly_paths", sc.GetReadonlyPaths(), validateAbsolute),
	)
}

// validateID limits user and group IDs to 31 bits, as Kubernetes does, because a larger ID turns negative in programs
// that store it in an int (CVE-2024-40635).
func validateID(field string, id *runtimeapi.Int64Value) error {
	if v := id.GetValue(); v < 0 || v > math.MaxInt32 {
		return invalid(field, "%d is not an ID between 0 and %d", v, math.MaxInt32)
	}
	return nil
}

func validateGroups(field string, groups []int64, policy runtimeapi.SupplementalGroupsPolicy) error {
	return cmp.Or(
		validateEnum(field+".supplemental_groups_policy", policy, runtimeapi.SupplementalGroupsPolicy_name),
		validateEach(field+".supplemental_groups", groups, func(field string, id int64) error {
			return validateID(field, &runtimeapi.Int64Value{Value: id})
		}),
	)
}

func validateProfile(field string, p *runtimeapi.SecurityProfile) error {
	ref := p.GetLocalhostRef()
	switch p.GetProfileType() {
	case runtimeapi.SecurityProfile_Localhost:
		if ref == "" {
			return required(field + ".localhost_ref")
		}
		return validatePath(field+".localhost_ref", ref)
	default:
		if ref != "" {
			return invalid(field+".localhost_ref", "must not be set with %s, only with Localhost", p.GetProfileType())
		}
	}
	return validateEnum(field+".profile_type", p.GetProfileType(), runtimeapi.SecurityProfile_ProfileType_name)
}

// validateSeccomp requires an absolute path for a profile on the node.
func validateSeccomp(field string, p *runtimeapi.SecurityProfile) error {
	return cmp.Or(validateProfile(field, p), validateAbsolute(field+".localhost_ref", p.GetLocalhostRef()))
}

// validateSandboxNamespaces rejects a namespace target, which a sandbox cannot have.
func validateSandboxNamespaces(field string, o *runtimeapi.NamespaceOption) error {
	const pod, container, host = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE
	if o.GetTargetId() != "" {
		return invalid(field+".target_id", "must not be set for a sandbox")
	}
	return cmp.Or(
		validateMode(field+".network", o.GetNetwork(), pod, host),
		validateMode(field+".pid", o.GetPid(), pod, container, host),
		validateMode(field+".ipc", o.GetIpc(), pod, host),
		validateMode(field+".userns_options.mode", o.GetUsernsOptions().GetMode(), pod, host),
	)
}

// validateContainerNamespaces lets a container join only the PID namespace of another container. The request must name
// that container by its ID.
func validateContainerNamespaces(field string, o *runtimeapi.NamespaceOption) error {
	const pod, container = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER
	const host, target = runtimeapi.NamespaceMode_NODE, runtimeapi.NamespaceMode_TARGET
	switch {
	case o.GetPid() == target && o.GetTargetId() == "":
		return required(field + ".target_id")
	case o.GetPid() != target && o.GetTargetId() != "":
		return invalid(field+".target_id", "must not be set unless pid is TARGET")
	}
	return cmp.Or(
		validateMode(field+".network", o.GetNetwork(), pod, host),
		validateMode(field+".pid", o.GetPid(), pod, container, host, target),
		validateMode(field+".ipc", o.GetIpc(), pod, host),
		validateMode(field+".userns_options.mode", o.GetUsernsOptions().GetMode(), pod, host),
	)
}

func validateMode(field string, mode runtimeapi.NamespaceMode, allowed ...runtimeapi.NamespaceMode) error {
	if !slices.Contains(allowed, mode) {
		return invalid(field, "%s is not one of %s", mode, allowed)
	}
	return nil
}
