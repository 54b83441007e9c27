//! The llama.cpp library: initialization, log, version.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use llama_cpp_sys_2 as sys;

/// The versions of the bindings, which include llama.cpp, and of its ggml.
pub fn version() -> String {
    // SAFETY: returns a pointer to a constant of the library, or null.
    let ggml = unsafe { text(sys::ggml_version()) };
    format!("llama-cpp-sys-2 {LLAMA_CPP_SYS}, ggml {ggml}")
}

/// Version of `llama-cpp-sys-2` that `Cargo.toml` pins.
const LLAMA_CPP_SYS: &str = "0.1.161";

/// Errors that llama.cpp has logged since [`forget_log`].
static LOG: Mutex<String> = Mutex::new(String::new());

thread_local! {
    /// Lines about sizes of buffers that llama.cpp has logged on this thread since [`forget_sizes`].
    static SIZES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Initializes llama.cpp once and redirects its log to [`LOG`].
pub fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        // SAFETY: `log` is a static function of the required type.
        unsafe { sys::llama_log_set(Some(log), ptr::null_mut()) };
        // SAFETY: called once, before all other functions of llama.cpp.
        unsafe { sys::llama_backend_init() };
    });
}

static END: OnceLock<fn(&str) -> !> = OnceLock::new();

/// Sets the callback that llama.cpp calls instead of aborting the process. Its argument is source line and failed condition:
/// `qwen3moe.cpp:66: GGML_ASSERT(n_embd_head == n_rot) failed`. Only the first call of `on_abort` has an effect. `end` may be
/// called on any thread and must end the process. Without it, llama.cpp prints a backtrace and raises SIGABRT.
pub fn on_abort(end: fn(&str) -> !) {
    if END.set(end).is_ok() {
        // SAFETY: `aborted` is a static function of the required type.
        unsafe { sys::ggml_set_abort_callback(Some(aborted)) };
    }
}

extern "C" fn aborted(message: *const c_char) {
    // SAFETY: llama.cpp passes a NUL-terminated string that lives during this call.
    let message = unsafe { text(message) };
    // Omit the directories of the source file, which are those of the build machine.
    let (path, rest) = message.split_once(':').unwrap_or(("", &message));
    let file = path.rsplit(['/', '\\']).next().unwrap_or(path);
    if let Some(end) = END.get() {
        end(&format!("{file}:{rest}"));
    }
}

/// Clears the log. Call it before an operation whose failure [`logged`] should explain.
pub fn forget_log() {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// The errors that llama.cpp has logged, on one line.
pub fn logged() -> String {
    let log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    let lines: Vec<&str> = log
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    if lines.is_empty() {
        "it logged no reason".to_owned()
    } else {
        lines.join("; ")
    }
}

/// Clears the lines that [`logged_sizes`] returns.
pub fn forget_sizes() {
    SIZES.with_borrow_mut(Vec::clear);
}

/// Returns and clears the lines about sizes of buffers that llama.cpp has logged on this thread.
pub fn logged_sizes() -> Vec<String> {
    SIZES.take()
}

extern "C" fn log(level: sys::ggml_log_level, line: *const c_char, _: *mut c_void) {
    /// Maximum length of the stored log in bytes.
    const MAX_BYTES: usize = 4096;
    /// Maximum number of stored lines about sizes.
    const MAX_SIZES: usize = 256;
    if level == sys::GGML_LOG_LEVEL_INFO {
        // SAFETY: llama.cpp passes a NUL-terminated string that lives during this call.
        let line = unsafe { text(line) };
        if line.contains("size = ") {
            SIZES.with_borrow_mut(|sizes| {
                if sizes.len() < MAX_SIZES {
                    sizes.push(line.trim().to_owned());
                }
            });
        }
    }
    if level < sys::GGML_LOG_LEVEL_ERROR || level == sys::GGML_LOG_LEVEL_CONT {
        return;
    }
    // SAFETY: llama.cpp passes a NUL-terminated string that lives during this call.
    let line = unsafe { text(line) };
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if log.len() < MAX_BYTES {
        log.push_str(&line);
    }
}

/// A C string as text; empty for null.
///
/// # Safety
/// `chars` is null, or a NUL-terminated string that lives during the call.
pub unsafe fn text(chars: *const c_char) -> String {
    if chars.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(chars) }
        .to_string_lossy()
        .into_owned()
}
