//! llama.cpp as a whole: start, log, version.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use llama_cpp_sys_2 as sys;

/// The version of the bindings, which names the llama.cpp in them, and of its ggml.
pub fn version() -> String {
    // SAFETY: gives a pointer to a constant of the library, or null.
    let ggml = unsafe { text(sys::ggml_version()) };
    format!("llama-cpp-sys-2 {LLAMA_CPP_SYS}, ggml {ggml}")
}

/// Of `llama-cpp-sys-2`, as `Cargo.toml` pins it.
const LLAMA_CPP_SYS: &str = "0.1.161";

/// Errors that llama.cpp has logged since [`forget_log`].
static LOG: Mutex<String> = Mutex::new(String::new());

/// Starts llama.cpp, once, with its log turned to [`LOG`].
pub fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        // SAFETY: `log` is a function of the type asked for and never goes away.
        unsafe { sys::llama_log_set(Some(log), ptr::null_mut()) };
        // SAFETY: called once, before anything else of llama.cpp.
        unsafe { sys::llama_backend_init() };
    });
}

static END: OnceLock<fn(&str) -> !> = OnceLock::new();

/// Has llama.cpp call `end` where it would abort the process, with the place and the condition that failed:
/// `qwen3moe.cpp:66: GGML_ASSERT(n_embd_head == n_rot) failed`. A later `end` has no effect. It may be called on any thread,
/// and must end the process. Without it llama.cpp prints a backtrace and raises SIGABRT.
pub fn on_abort(end: fn(&str) -> !) {
    if END.set(end).is_ok() {
        // SAFETY: `aborted` is a function of the type asked for and never goes away.
        unsafe { sys::ggml_set_abort_callback(Some(aborted)) };
    }
}

extern "C" fn aborted(message: *const c_char) {
    // SAFETY: llama.cpp passes a string that ends in a NUL and lives through this call.
    let message = unsafe { text(message) };
    // The path of the source file is of the machine that compiled it.
    let (path, rest) = message.split_once(':').unwrap_or(("", &message));
    let file = path.rsplit(['/', '\\']).next().unwrap_or(path);
    if let Some(end) = END.get() {
        end(&format!("{file}:{rest}"));
    }
}

/// Empties the log before something is tried.
pub fn forget_log() {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// What llama.cpp has to say of a failure, in one line.
pub fn logged() -> String {
    let log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    let lines: Vec<&str> = log
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    if lines.is_empty() {
        "it says nothing of the reason".to_owned()
    } else {
        lines.join("; ")
    }
}

extern "C" fn log(level: sys::ggml_log_level, line: *const c_char, _: *mut c_void) {
    /// More is not kept: nobody reads it.
    const MAX_BYTES: usize = 4096;
    if level < sys::GGML_LOG_LEVEL_ERROR || level == sys::GGML_LOG_LEVEL_CONT {
        return;
    }
    // SAFETY: llama.cpp hands over a string that ends in a NUL and lives through this call.
    let line = unsafe { text(line) };
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if log.len() < MAX_BYTES {
        log.push_str(&line);
    }
}

/// A C string as text; null is empty.
///
/// # Safety
/// `chars` is null, or a string that ends in a NUL and lives through the call.
pub unsafe fn text(chars: *const c_char) -> String {
    if chars.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(chars) }
        .to_string_lossy()
        .into_owned()
}
