//! Opening a file with a hostile header and mapping it allocates memory in proportion to the header.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use moe_gguf::check::check;
use moe_gguf::layers::layer_order;
use moe_gguf::map::OffsetMap;
use moe_gguf::{Fault, Gguf};
use moe_testkit::gguf::{ARRAY, F32, Raw, STRING};

/// An allocator that counts current and peak bytes by thread, because other tests run at the same time.
struct Counting;

thread_local! {
    /// Negative in a thread that frees memory of another thread.
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system allocator with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // 16 bytes: upper bound of the overhead per allocation of the system allocator.
        let now = NOW.get() + (layout.size() + 16) as isize;
        NOW.set(now);
        PEAK.set(PEAK.get().max(now));
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.set(NOW.get() - (layout.size() + 16) as isize);
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the peak memory in bytes of opening, mapping and checking a file.
fn peak(raw: Raw) -> (usize, Option<Fault>) {
    let bytes: &'static [u8] = raw.bytes.leak();
    let before = NOW.get();
    PEAK.set(before);
    let fault = match Gguf::from_static("test.gguf", bytes) {
        Ok(gguf) => {
            let map = OffsetMap::new(&gguf);
            check(&gguf);
            layer_order(&gguf);
            drop(map);
            None
        }
        Err(error) => error.fault().cloned(),
    };
    ((PEAK.get() - before) as usize, fault)
}

const MIB: usize = 1 << 20;

/// The documented limit of the program is 64 MiB + 8 × the header. Half of the constant is reserved for the rest of the
/// program.
fn assert_bounded(what: &str, raw: Raw) {
    let header = raw.bytes.len();
    let (peak, fault) = peak(raw);
    assert!(
        peak <= 32 * MIB + 8 * header,
        "{what}: {} MiB for a header of {} MiB ({fault:?})",
        peak / MIB,
        header / MIB
    );
}

/// Returns a unique name of four bytes.
fn short_name(i: u64) -> String {
    (0..4)
        .map(|digit| char::from(b'!' + (i / 85_u64.pow(digit) % 85) as u8))
        .collect()
}

#[test]
fn memory_is_proportional_to_the_header() {
    const N: u64 = 1_000_000;
    let keys = (0..N).fold(Raw::new(0, N), |raw, i| {
        raw.string(&short_name(i)).raw(&[0, 0, 0, 0, 1])
    });
    assert_bounded("many keys of one byte", keys);

    let texts = (0..N).fold(Raw::new(0, N), |raw, i| {
        raw.string(&short_name(i)).u32(STRING).string("x")
    });
    assert_bounded("many short strings", texts);

    let arrays = (0..N).fold(Raw::new(0, N), |raw, i| {
        raw.string(&short_name(i)).u32(ARRAY).u32(0).u64(0)
    });
    assert_bounded("many empty arrays", arrays);

    let one = Raw::new(0, 1).string("k").u32(ARRAY).u32(STRING).u64(4 * N);
    assert_bounded(
        "an array of empty strings",
        one.raw(&vec![0; 32 * N as usize]),
    );

    let n = 1 << 18;
    let tensors = (0..n).fold(Raw::new(n, 0), |raw, i| {
        raw.tensor(&short_name(i), &[], F32, 0)
    });
    assert_bounded("the maximum number of tensors", tensors);

    let n = 5 << 8;
    let experts = (0..n).fold(Raw::new(n, 0), |raw, i| {
        raw.tensor(
            &format!("blk.{i}.ffn_up_exps.weight"),
            &[1, 1, 1 << 8],
            F32,
            0,
        )
    });
    assert_bounded("the maximum number of experts", experts);

    for (n_tensors, n_kv) in [
        (0, 8 * N / 14),
        (8 * N / 24, 0),
        (u64::MAX, 0),
        (0, u64::MAX),
    ] {
        let (peak, fault) = peak(Raw::new(n_tensors, n_kv).raw(&vec![0; 8 * N as usize]));
        assert!(fault.is_some());
        assert!(peak <= MIB, "counts larger than the file: {peak} bytes");
    }
}
