//! Handlers of signals that end a program. They remove its temporary files first, and report a truncated input.
//!
//! Handlers only write to a pipe. A thread reads the pipe and does the work, so that no handler takes a lock or allocates
//! memory.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::text::escape_hidden;

static WANTED: AtomicBool = AtomicBool::new(false);
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Returns a flag that the first interrupt sets from now on, instead of ending the program. The second interrupt ends it.
pub fn interrupted() -> &'static AtomicBool {
    WANTED.store(true, Ordering::SeqCst);
    &INTERRUPTED
}

/// Makes interrupts end the program again, after a call of [`interrupted`].
pub fn end_on_interrupt() {
    WANTED.store(false, Ordering::SeqCst);
}

/// Sets the flag if [`interrupted`] requests it. Returns false if the interrupt must end the program.
fn set_flag() -> bool {
    WANTED.load(Ordering::SeqCst) && !INTERRUPTED.swap(true, Ordering::SeqCst)
}

/// Handles an interrupt on systems without `install`: sets the flag, or removes temporary files and ends the process.
#[cfg(not(unix))]
pub fn interrupt() {
    /// Exit status of a program that Ctrl-C ends.
    const EXIT_INTERRUPTED: i32 = 130;
    if !set_flag() {
        crate::temporary::registry().remove_all();
        std::process::exit(EXIT_INTERRUPTED);
    }
}

#[cfg(unix)]
pub(crate) use unix::are_installed;
#[cfg(unix)]
pub use unix::{fail, install};

#[cfg(not(unix))]
pub(crate) fn are_installed() -> bool {
    false
}

/// Removes temporary files, prints `line` on stderr and ends the process with status 2.
#[cfg(not(unix))]
pub fn fail(line: &str) -> ! {
    crate::temporary::registry().remove_all();
    eprintln!("{line}");
    std::process::exit(2)
}

#[cfg(unix)]
mod unix {
    use std::fs::File;
    use std::io::{self, Read, Write};
    use std::mem::{self, MaybeUninit};
    use std::os::fd::{AsRawFd, IntoRawFd};
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
    use std::time::Duration;

    use libc::{c_int, c_void, siginfo_t};

    use crate::mapped;
    use crate::temporary::registry;

    /// Exit status after [`fail`].
    const EXIT_FAILED: c_int = 2;
    /// Added to the number of a signal, the exit status that shells report for a program which the signal ended.
    const EXIT_SIGNAL: c_int = 128;
    /// Time to wait until another thread receives a signal that was sent to the process.
    const DELIVERY: Duration = Duration::from_millis(100);
    /// Stack of the signal thread, in bytes.
    const STACK_SIZE: usize = 256 << 10;
    /// Bytes of a message from a handler: signal number, and the address for SIGBUS. Writes of this size to a pipe are atomic.
    const MESSAGE_SIZE: usize = 2 * size_of::<usize>();

    /// Write end of the pipe.
    static PIPE: AtomicI32 = AtomicI32::new(-1);
    /// Whether the previous action for SIGBUS is restored.
    static RELEASED: AtomicBool = AtomicBool::new(false);
    /// The action for SIGBUS before [`install`].
    static EARLIER: OnceLock<libc::sigaction> = OnceLock::new();

    type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

    /// Installs the handlers of a program, once, at its start. Libraries must not call this.
    ///
    /// - SIGINT, SIGTERM and SIGHUP, unless ignored: the handler removes temporary files and ends the program by the same
    ///   signal. For a task that stops by itself, see [`interrupted`](super::interrupted).
    /// - SIGBUS of a truncated [`MappedFile`](crate::MappedFile) (on Linux, of any truncated mapped file): the handler removes
    ///   temporary files, prints one line `PROGRAM: FILE: ...` on stderr, and ends the program with status 2. Any other SIGBUS
    ///   is passed to the previous handler.
    /// - SIGXFSZ is ignored, so that exceeding the file size limit is a write error.
    ///
    /// # Errors
    /// The system cannot create a pipe or a thread.
    pub fn install(program: &'static str) -> io::Result<()> {
        let (reader, writer) = io::pipe()?;
        // The pipe stays open until the process ends.
        let reader = File::from(std::os::fd::OwnedFd::from(reader));
        std::thread::Builder::new()
            .name("signals".into())
            .stack_size(STACK_SIZE)
            .spawn(move || serve(reader, program))?;
        PIPE.store(writer.into_raw_fd(), Ordering::SeqCst);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // `nohup` ignores SIGHUP. A shell without job control ignores SIGINT for background jobs.
            if action(signal)?.sa_sigaction != libc::SIG_IGN {
                set_action(signal, on_interrupt)?;
            }
        }
        let _ = EARLIER.set(action(libc::SIGBUS)?);
        set_action(libc::SIGBUS, on_bus_error)?;
        // SAFETY: ignoring a signal runs no handler.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        Ok(())
    }

    /// Whether the handlers are installed.
    pub(crate) fn are_installed() -> bool {
        PIPE.load(Ordering::SeqCst) >= 0
    }

    fn set_action(signal: c_int, handler: Handler) -> io::Result<()> {
        // SAFETY: zeros are a valid `sigaction`: no flags, an empty mask, the default action.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // SA_ONSTACK: a stack overflow reaches std's handler through this one, and needs the alternative stack.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        // SAFETY: the action is valid, and the handlers below call only async-signal-safe functions.
        match unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The current action for a signal.
    fn action(signal: c_int) -> io::Result<libc::sigaction> {
        let mut action = MaybeUninit::uninit();
        // SAFETY: without a new action the call only writes the current one to a valid pointer.
        match unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) } {
            // SAFETY: the call succeeded and has written it.
            0 => Ok(unsafe { action.assume_init() }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sends a message to the signal thread. Async-signal-safe; preserves `errno`.
    fn send(signal: c_int, address: usize) {
        let mut message = [0; MESSAGE_SIZE];
        let (head, tail) = message.split_at_mut(size_of::<usize>());
        head.copy_from_slice(&(signal as usize).to_ne_bytes());
        tail.copy_from_slice(&address.to_ne_bytes());
        // SAFETY: `write` is async-signal-safe and reads a valid buffer of that size. `errno` belongs to this thread.
        unsafe {
            let errno = errno();
            let saved = *errno;
            libc::write(
                PIPE.load(Ordering::SeqCst),
                message.as_ptr().cast(),
                MESSAGE_SIZE,
            );
            *errno = saved;
        }
    }

    /// Returns the address of this thread's `errno`.
    fn errno() -> *mut c_int {
        // SAFETY: these functions have no preconditions.
        unsafe {
            #[cfg(any(target_os = "linux", target_os = "emscripten"))]
            return libc::__errno_location();
            #[cfg(any(target_vendor = "apple", target_os = "freebsd"))]
            return libc::__error();
            #[cfg(any(target_os = "android", target_os = "netbsd", target_os = "openbsd"))]
            return libc::__errno();
        }
    }

    extern "C" fn on_interrupt(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
        send(signal, 0);
    }

    extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
        // SAFETY: the system passes valid information to a handler with SA_SIGINFO.
        let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
        send(signal, address);
        while !RELEASED.load(Ordering::SeqCst) {
            // SAFETY: `poll` is async-signal-safe; without descriptors it waits for the timeout of 1 ms.
            unsafe { libc::poll(ptr::null_mut(), 0, 1) };
        }
        // After a fault, the instruction runs again and raises it for the previous handler. A signal sent by `kill` (code <= 0)
        // must be raised here.
        if code <= 0 {
            // SAFETY: `raise` is async-signal-safe.
            unsafe { libc::raise(signal) };
        }
    }

    /// Processes the messages of the handlers, on the signal thread.
    fn serve(mut pipe: File, program: &str) {
        let mut message = [0; MESSAGE_SIZE];
        while pipe.read_exact(&mut message).is_ok() {
            let [signal, address] = [0, 1].map(|i| {
                let mut bytes = [0; size_of::<usize>()];
                bytes.copy_from_slice(&message[i * size_of::<usize>()..][..size_of::<usize>()]);
                usize::from_ne_bytes(bytes)
            });
            if signal as c_int == libc::SIGBUS {
                match mapped::file_at(address) {
                    Some(file) => fail(&format!("{program}: {}", super::truncated_message(&file))),
                    None => release(),
                }
            } else if !super::set_flag() {
                end_by(signal as c_int);
            }
        }
    }

    /// Removes temporary files, prints `line` on stderr and ends the process with status 2.
    ///
    /// Any thread may call it at any time: neither destructors nor exit handlers run.
    pub fn fail(line: &str) -> ! {
        // Locked until the process ends, so that other threads create no temporary files.
        let mut registry = registry();
        registry.remove_all();
        let line = format!("{line}\n");
        // Not through std's stderr: another thread may hold its lock.
        let stderr = io::stderr().as_raw_fd();
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            // SAFETY: the buffer is valid for its length.
            let n = unsafe { libc::write(stderr, rest.as_ptr().cast(), rest.len()) };
            match usize::try_from(n) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        // SAFETY: `_exit` has no preconditions. Destructors and exit handlers could deadlock with threads that wait in a handler.
        unsafe { libc::_exit(EXIT_FAILED) }
    }

    /// Restores the previous action for SIGBUS.
    fn release() {
        if let Some(earlier) = EARLIER.get() {
            // SAFETY: the action was returned by the system.
            unsafe { libc::sigaction(libc::SIGBUS, earlier, ptr::null_mut()) };
        }
        RELEASED.store(true, Ordering::SeqCst);
    }

    /// Removes temporary files and ends the process by the signal.
    fn end_by(signal: c_int) -> ! {
        let mut registry = registry();
        registry.remove_all();
        let _ = io::stderr().flush();
        // SAFETY: both functions have no preconditions. The signal is sent to the process, so that any thread may receive it; its
        // default action ends the process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::kill(libc::getpid(), signal);
        }
        std::thread::sleep(DELIVERY);
        // Reached in the init process of a container, for which the kernel discards signals without a handler.
        // SAFETY: `_exit` has no preconditions. Exit handlers could deadlock with threads that wait for the registry.
        unsafe { libc::_exit(EXIT_SIGNAL + signal) }
    }
}

/// Returns the error message for a mapped file that was truncated, without the name of the program.
pub fn truncated_message(file: &Path) -> String {
    let mut name = String::new();
    escape_hidden(&file.to_string_lossy(), &mut name);
    format!(
        "{name}: the file was truncated while it was read; run the command again once it is complete"
    )
}
