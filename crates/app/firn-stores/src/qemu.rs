//! The interface between QEMU and a plugin (include/qemu/qemu-plugin.h;
//! docs/devel/tcg-plugins.rst).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io::{self, Write as _};
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::orders::{self, PluginPaths};
use crate::recorder::{self, FILTER};

/// `QEMU_PLUGIN_CB_NO_REGS`, `QEMU_PLUGIN_MEM_W`.
const NO_REGISTERS: c_int = 0;
const WRITES: c_int = 2;

/// A block of translated code, and one of its instructions.
#[repr(C)]
struct TranslationBlock([u8; 0]);
#[repr(C)]
struct TranslatedInstruction([u8; 0]);

/// The beginning of QEMU's description of itself.
#[repr(C)]
pub struct QemuInfo {
    target: *const c_char,
    /// Versions of the interface: the lowest that QEMU accepts, and its own.
    versions: [c_int; 2],
}

/// From this version of the interface on, callbacks have other arguments.
const VERSION_UNSUPPORTED: c_int = 7;

type StoreCallback = extern "C" fn(c_uint, u32, u64, *mut c_void);

unsafe extern "C" {
    fn qemu_plugin_register_vcpu_init_cb(id: u64, callback: extern "C" fn(u64, c_uint));
    fn qemu_plugin_register_vcpu_tb_trans_cb(
        id: u64,
        callback: extern "C" fn(u64, *mut TranslationBlock),
    );
    fn qemu_plugin_tb_n_insns(block: *const TranslationBlock) -> usize;
    fn qemu_plugin_tb_get_insn(
        block: *const TranslationBlock,
        number: usize,
    ) -> *mut TranslatedInstruction;
    fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut TranslatedInstruction,
        callback: StoreCallback,
        flags: c_int,
        kinds: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_mem_size_shift(info: u32) -> c_uint;
    fn qemu_plugin_mem_is_store(info: u32) -> bool;
}

/// The version of the interface. QEMU 9 accepts no plugin of version 1, and earlier ones accept
/// none of version 2. The functions used here are the same in both, and up to version 6.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "QEMU's name")]
pub static qemu_plugin_version: AtomicI32 = AtomicI32::new(1);

#[used]
#[unsafe(link_section = ".init_array")]
static WHEN_LOADED: extern "C" fn() = choose_version;

extern "C" fn choose_version() {
    // SAFETY: a name that ends with a zero, searched for in what is already loaded.
    let newer = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"qemu_plugin_scoreboard_new".as_ptr()) };
    if !newer.is_null() {
        qemu_plugin_version.store(2, Ordering::Relaxed);
    }
}

/// The plugin's paths until QEMU makes the first vCPU: only then QEMU is in its final process.
static PATHS: Mutex<Option<PluginPaths>> = Mutex::new(None);

/// QEMU calls this after it has loaded the plugin. Returns a value other than 0 if the plugin
/// cannot work.
///
/// # Safety
/// QEMU calls this once, with its description of itself, and with arguments that end with a zero
/// each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    info: *const QemuInfo,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    let argument = |number: c_int| {
        // SAFETY: there are this many arguments, as the caller promises.
        unsafe { CStr::from_ptr(*argv.add(number as usize)) }.to_str().unwrap_or_default()
    };
    // SAFETY: as the caller promises.
    let [_, version] = unsafe { (*info).versions };
    if version >= VERSION_UNSUPPORTED {
        return print_refusal(&format!(
            "version {version} of QEMU's interface for plugins is not supported"
        ));
    }
    let Some(paths) = PluginPaths::parse_arguments((0..argc).map(argument)) else {
        return print_refusal("expected window=FILE,orders=SOCKET");
    };
    *PATHS.lock().unwrap_or_else(PoisonError::into_inner) = Some(paths);
    // SAFETY: the id is the one that QEMU gave, and the functions exist for as long as the plugin.
    unsafe {
        qemu_plugin_register_vcpu_init_cb(id, vcpu_created);
        qemu_plugin_register_vcpu_tb_trans_cb(id, block_translated);
    }
    0
}

fn print_refusal(why: &str) -> c_int {
    print_message(why);
    1
}

/// Writes a message to stderr; errors are ignored.
fn print_message(what: &str) {
    let _ = writeln!(io::stderr(), "firn-stores: {what}");
}

/// At the first vCPU: starts the thread that receives the supervisor's orders, which name the areas
/// whose stores are to be recorded ([`crate::orders`]).
extern "C" fn vcpu_created(_: u64, _: c_uint) {
    let paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner).take();
    let listened = paths.map(|paths| catch_unwind(|| orders::start_listener(paths)));
    if let Some(Ok(Err(error))) = listened {
        print_message(&format!("cannot listen for orders: {error}"));
    }
}

extern "C" fn block_translated(_: u64, block: *mut TranslationBlock) {
    // SAFETY: the block is QEMU's, for the duration of this call; each instruction belongs to it.
    unsafe {
        for number in 0..qemu_plugin_tb_n_insns(block) {
            let instruction = qemu_plugin_tb_get_insn(block, number);
            qemu_plugin_register_vcpu_mem_cb(
                instruction,
                memory_accessed,
                NO_REGISTERS,
                WRITES,
                std::ptr::null_mut(),
            );
        }
    }
}

extern "C" fn memory_accessed(_: c_uint, info: u32, at: u64, _: *mut c_void) {
    if FILTER.may_contain(at) {
        record_store(info, at);
    }
}

#[cold]
fn record_store(info: u32, at: u64) {
    // QEMU 7.2 also reports the loads of instructions that store (`rep movs`).
    // SAFETY: as QEMU gave it.
    if !unsafe { qemu_plugin_mem_is_store(info) } {
        return;
    }
    // SAFETY: as QEMU gave it.
    let bytes = 1 << unsafe { qemu_plugin_mem_size_shift(info) };
    if catch_unwind(|| recorder::handle_store(at, bytes)).is_err() {
        let _ = catch_unwind(recorder::stop_recording);
    }
}
