//! Starts that kernels store.

use crate::cuda::tests::device::{Device, noise};

#[test]
fn kernels_store_their_starts_in_order() {
    let Some(device) = Device::open() else { return };
    const N: usize = 1 << 24;
    const KERNELS: usize = 16;
    let (x, out) = (device.upload(&noise(N, 1)), device.nan_output(N));
    let starts = device.upload(&[0u64; KERNELS + 1]);
    let (x, out, stream) = (device.at(&x), device.at(&out), &device.stream);
    let context = stream.context();
    let timed = cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
    let event = || context.new_event(Some(timed)).unwrap();
    let (begin, end) = (event(), event());
    let next = device.kernels.launches();
    // The first launch of a kernel loads it.
    device.kernels.add(stream, x, x, N, out).unwrap();
    device.kernels.mark(stream).unwrap();
    begin.record(stream).unwrap();
    for kernel in 0..KERNELS {
        next.store_start(device.at(&starts).offset(kernel * size_of::<u64>()));
        device.kernels.add(stream, x, x, N, out).unwrap();
        assert!(!next.stores_start(), "the launch used it");
        // A kernel whose start is not wanted stores nothing.
        device.kernels.add(stream, x, x, N, out).unwrap();
    }
    next.store_start(device.at(&starts).offset(KERNELS * size_of::<u64>()));
    device.kernels.mark(stream).unwrap();
    end.record(stream).unwrap();
    let starts = device.download(&starts).unwrap();
    // Each pair of kernels reads and writes 400 MB, which takes at least 40 µs on any GPU.
    let spans: Vec<u64> = starts
        .windows(2)
        .map(|pair| pair[1].saturating_sub(pair[0]))
        .collect();
    assert!(spans.iter().all(|&ns| ns > 10_000), "{spans:?}");
    let by_events = f64::from(begin.elapsed_ms(&end).unwrap()) * 1e6;
    let by_starts = (starts[KERNELS] - starts[0]) as f64;
    let share = by_starts / by_events;
    assert!(
        (0.98..1.001).contains(&share),
        "{by_starts} ns of {by_events} ns"
    );
}
