
/// What the code of wit-bindgen needs at run time.
pub mod rt {
    use std::alloc::{self, Layout};

    /// Memory that is freed at the end of a call of the host.
    pub struct Cleanup {
        memory: *mut u8,
        layout: Layout,
    }

    impl Cleanup {
        /// Returns memory, and what frees it if that is not empty.
        pub fn new(layout: Layout) -> (*mut u8, Option<Cleanup>) {
            if layout.size() == 0 {
                return (layout.align() as *mut u8, None);
            }
            let memory = unsafe { alloc::alloc(layout) };
            if memory.is_null() {
                alloc::handle_alloc_error(layout);
            }
            (memory, Some(Cleanup { memory, layout }))
        }

        /// Lets another free the memory.
        pub fn forget(self) {
            std::mem::forget(self);
        }
    }

    impl Drop for Cleanup {
        fn drop(&mut self) {
            unsafe { alloc::dealloc(self.memory, self.layout) }
        }
    }

    /// By this, the host gets memory for what it passes.
    #[cfg(target_arch = "wasm32")]
    #[export_name = "cabi_realloc"]
    unsafe extern "C" fn cabi_realloc(old: *mut u8, old_size: usize, align: usize, size: usize) -> *mut u8 {
        if size == 0 {
            return align as *mut u8;
        }
        let layout = Layout::from_size_align_unchecked(size, align);
        let memory = match old_size {
            0 => alloc::alloc(layout),
            _ => alloc::realloc(old, Layout::from_size_align_unchecked(old_size, align), size),
        };
        if memory.is_null() {
            alloc::handle_alloc_error(layout);
        }
        memory
    }

    /// Called once, when an instance begins. Without it, the linker would let each call begin with the constructors of C.
    #[cfg(target_arch = "wasm32")]
    #[export_name = "_initialize"]
    unsafe extern "C" fn initialize() {
        extern "C" {
            fn __wasm_call_ctors();
        }
        __wasm_call_ctors();
    }
}
