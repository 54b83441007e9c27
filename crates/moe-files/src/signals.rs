//! Signals that end a program: its temporary files are removed first, and a truncated input is named.
//!
//! Handlers only write to a pipe. A thread reads it and does the work, so that no lock is taken and nothing is allocated
//! in a handler.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::text::escape_hidden;

static WANTED: AtomicBool = AtomicBool::new(false);
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A flag that the first interrupt sets from now on, instead of ending the program; the second one ends it.
pub fn interrupted() -> &'static AtomicBool {
    WANTED.store(true, Ordering::SeqCst);
    &INTERRUPTED
}

/// Interrupts end the program again, from now on.
pub fn end_on_interrupt() {
    WANTED.store(false, Ordering::SeqCst);
}

/// Whether an interrupt has only to set the flag.
fn set_flag() -> bool {
    WANTED.load(Ordering::SeqCst) && !INTERRUPTED.swap(true, Ordering::SeqCst)
}

/// What an interrupt does on systems without [`install`]: sets the flag, or removes temporary files and ends the process.
#[cfg(not(unix))]
pub fn interrupt() {
    /// Exit status of a program that Ctrl-C ended.
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
    /// Exit status, less its number, of a program that a signal ended, as shells report it.
    const EXIT_SIGNAL: c_int = 128;
    /// Within this time another thread takes a signal that was sent to the process.
    const DELIVERY: Duration = Duration::from_millis(100);
    /// Stack of the thread.
    const STACK_SIZE: usize = 256 << 10;
    /// A message of a handler: the signal, and an address for SIGBUS. Pipes take so few bytes at once or not at all.
    const MESSAGE_SIZE: usize = 2 * size_of::<usize>();

    /// Write end of the pipe.
    static PIPE: AtomicI32 = AtomicI32::new(-1);
    /// Whether SIGBUS goes to its earlier handler.
    static RELEASED: AtomicBool = AtomicBool::new(false);
    /// The action for SIGBUS before [`install`].
    static EARLIER: OnceLock<libc::sigaction> = OnceLock::new();

    type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

    /// Installs the handlers of a program, once, at its start. A library never calls this.
    ///
    /// - SIGINT, SIGTERM and SIGHUP, each where it was not ignored: temporary files are removed, and the program ends by the
    ///   signal. See [`interrupted`](super::interrupted) for long work that ends by itself.
    /// - SIGBUS of a [`MappedFile`](crate::MappedFile), on Linux of any mapped file that was truncated: temporary files are removed, one line on stderr that starts
    ///   with `program` names the file, and the exit status is 2. Any other SIGBUS goes to the earlier handler.
    /// - SIGXFSZ is ignored, so that a file over the limit is a write error.
    ///
    /// # Errors
    /// The system has no pipe or thread left.
    pub fn install(program: &'static str) -> io::Result<()> {
        let (reader, writer) = io::pipe()?;
        // From here on the pipe stays open until the process ends.
        let reader = File::from(std::os::fd::OwnedFd::from(reader));
        std::thread::Builder::new()
            .name("signals".into())
            .stack_size(STACK_SIZE)
            .spawn(move || serve(reader, program))?;
        PIPE.store(writer.into_raw_fd(), Ordering::SeqCst);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // `nohup` ignores SIGHUP, a shell without job control SIGINT of a job in the background.
            if action(signal)?.sa_sigaction != libc::SIG_IGN {
                set_action(signal, on_interrupt)?;
            }
        }
        let _ = EARLIER.set(action(libc::SIGBUS)?);
        set_action(libc::SIGBUS, on_bus_error)?;
        // SAFETY: ignoring a signal has no handler whose safety matters.
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
        // On the alternative stack where a thread has one, as std's handler of stack overflows needs it.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        // SAFETY: the action is valid, and the handlers below call async-signal-safe functions only.
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

    /// Sends a message to the thread. Async-signal-safe; keeps `errno`.
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

    /// Where this thread's `errno` is.
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
            // SAFETY: `poll` is async-signal-safe; without descriptors it waits for a millisecond.
            unsafe { libc::poll(ptr::null_mut(), 0, 1) };
        }
        // A fault is raised again by its instruction, now for the earlier handler; a signal that was sent is not.
        if code <= 0 {
            // SAFETY: `raise` is async-signal-safe.
            unsafe { libc::raise(signal) };
        }
    }

    /// Works on the messages of the handlers.
    fn serve(mut pipe: File, program: &str) {
        let mut message = [0; MESSAGE_SIZE];
        while pipe.read_exact(&mut message).is_ok() {
            let [signal, address] = [0, 1].map(|at| {
                let mut bytes = [0; size_of::<usize>()];
                bytes.copy_from_slice(&message[at * size_of::<usize>()..][..size_of::<usize>()]);
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

    /// Removes temporary files, prints `line` on stderr and ends the process with status 2. Any thread may call it, whatever
    /// other threads do: neither destructors nor exit handlers run.
    pub fn fail(line: &str) -> ! {
        // Kept locked, so that other threads create no more.
        let mut registry = registry();
        registry.remove_all();
        let line = format!("{line}\n");
        // Not through std's stderr, whose lock another thread may hold.
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
        // SAFETY: ends the process; destructors and exit handlers would meet threads that wait in a handler.
        unsafe { libc::_exit(EXIT_FAILED) }
    }

    /// Restores the earlier action for SIGBUS.
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
        // SAFETY: the default action of the signal ends the process; sent to it as a whole, any thread may take it.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::kill(libc::getpid(), signal);
        }
        std::thread::sleep(DELIVERY);
        // The first process of a container ignores a signal without a handler.
        // SAFETY: ends the process; exit handlers would meet threads that wait for the registry.
        unsafe { libc::_exit(EXIT_SIGNAL + signal) }
    }
}

/// The message about a mapped file that became smaller, without the program's name.
pub fn truncated_message(file: &Path) -> String {
    let mut name = String::new();
    escape_hidden(&file.to_string_lossy(), &mut name);
    format!(
        "{name}: the file was truncated while it was read; run the command again once it is complete"
    )
}
