//! wasmtime with its C API, and what that lacks. tw.h declares the functions of this file.

pub use wasmtime_c_api::*;

use wasmtime_c_api::wasmtime::{Config, Ref, Table, WasmFeatures};

/// What guests may use, of wasmtime's own defaults. With threads, a guest could wait on a shared memory, where no tick reaches
/// it. Garbage collection (which is not built in), exceptions, stack switching, 64-bit memories and asynchronous components
/// use resources that the engine does not limit. Multiple memories are for wasmtime's adapters between the modules of a
/// component; checkDeclared refuses guests with more than one.
const PROPOSALS: WasmFeatures = WasmFeatures::WASM2
    .union(WasmFeatures::RELAXED_SIMD)
    .union(WasmFeatures::TAIL_CALL)
    .union(WasmFeatures::EXTENDED_CONST)
    .union(WasmFeatures::MULTI_MEMORY)
    .union(WasmFeatures::COMPONENT_MODEL)
    .difference(WasmFeatures::GC_TYPES);

/// Makes an engine refuse what is not in PROPOSALS.
#[unsafe(no_mangle)]
pub extern "C" fn tripod_config_proposals(config: &mut wasm_config_t) {
    const { assert!(size_of::<wasm_config_t>() == size_of::<Config>()) };
    // SAFETY: wasm_config_t is #[repr(C)], and its only field, which is private, is a Config.
    let config = unsafe { &mut *(config as *mut wasm_config_t).cast::<Config>() };
    config.wasm_features(PROPOSALS.complement(), false);
}

/// Adds a table's size and functions to a checksum (FNV-1a). Returns false if it holds anything else. The C API reads
/// tables only if garbage collection is built in.
#[unsafe(no_mangle)]
pub extern "C" fn tripod_table_sum(mut store: WasmtimeStoreContextMut<'_>, table: &Table, sum: &mut u64) -> bool {
    const PRIME: u64 = 1099511628211;
    let size = table.size(&store);
    *sum = (*sum ^ size).wrapping_mul(PRIME);
    for at in 0..size {
        let Some(Ref::Func(function)) = table.get(&mut store, at) else {
            return false;
        };
        if let Some(function) = function {
            *sum ^= function.to_raw(&mut store) as u64;
        }
        *sum = sum.wrapping_mul(PRIME);
    }
    true
}
