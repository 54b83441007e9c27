//! [`Mirrored`] values on two entries for the same GPU.

use moe_testkit::{Need, skip};

use crate::cuda::{Error, Gpu, GpuSpec};
use crate::device_id::DeviceId;
use crate::mirrored::Mirrored;

/// Opens the first GPU twice with these limits in bytes. Skips the running test if there is no GPU.
#[track_caller]
fn open_twice(limits: [Option<u64>; 2]) -> Option<[Gpu; 2]> {
    if let Err(missing) = Gpu::detect() {
        skip(Need::Gpu, missing);
        return None;
    }
    let specs = limits.map(|limit| GpuSpec { ordinal: 0, limit });
    let gpus = Gpu::open_all(&specs).expect("the GPU can be opened");
    Some(gpus.try_into().ok().expect("two entries"))
}

/// The entries double the values in turn, without waits of the CPU in between.
#[test]
fn gpus_read_values_that_the_other_gpu_wrote() {
    let Some(gpus) = open_twice([None; 2]) else {
        return;
    };
    const N: usize = 1 << 22;
    const ROUNDS: u32 = 12;
    let before: Vec<f32> = (0..N).map(|i| (i % 1000) as f32).collect();
    let mut values = Mirrored::from(before.clone());
    for round in 0..ROUNDS {
        let gpu = &gpus[round as usize % 2];
        let x = values.update_device(gpu).unwrap();
        gpu.kernels().add(gpu.stream(), x, x, N, x).unwrap();
        assert_eq!(values.home(), DeviceId::Gpu(gpu.index()));
    }
    // Both have a copy of the newest values, in different memory.
    let copy = values.device(&gpus[0]).unwrap();
    let own = values.device(&gpus[1]).unwrap();
    assert_ne!(copy, own);
    assert_eq!(values.home(), DeviceId::Gpu(1));
    values.fetch().unwrap();
    assert_eq!(values.home(), DeviceId::Cpu);
    let factor = (1u64 << ROUNDS) as f32;
    let wrong = before
        .iter()
        .zip(values.host())
        .position(|(x, y)| x * factor != *y);
    assert_eq!(wrong, None);
}

#[test]
fn growing_keeps_values_on_the_gpu_that_wrote_them() {
    let Some(gpus) = open_twice([None; 2]) else {
        return;
    };
    let mut values = Mirrored::from(vec![1.0f32, 2.0]);
    values.device(&gpus[0]).unwrap();
    values.update_device(&gpus[1]).unwrap();
    values.grow(1000).unwrap();
    assert_eq!(values.home(), DeviceId::Gpu(1));
    // The copy on the first GPU was outdated.
    assert!(values.gpu_memory().get(0).is_none());
    values.device(&gpus[0]).unwrap();
    values.fetch().unwrap();
    assert_eq!((values.len(), &values.host()[..2]), (1000, &[1.0, 2.0][..]));
}

#[test]
fn clears_a_range_on_the_gpu_that_wrote_the_values() {
    let Some(gpus) = open_twice([None; 2]) else {
        return;
    };
    let mut values = Mirrored::from(vec![1.0f32; 9]);
    values.clear(0..1).unwrap();
    let x = values.update_device(&gpus[1]).unwrap();
    gpus[1].kernels().add(gpus[1].stream(), x, x, 9, x).unwrap();
    values.clear(3..5).unwrap();
    assert_eq!(values.home(), DeviceId::Gpu(1));
    values.fetch().unwrap();
    let want = [0.0, 2.0, 2.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0];
    assert_eq!(values.host(), want);
}

#[test]
fn entries_of_a_gpu_have_separate_limits() {
    let Some(gpus) = open_twice([Some(1 << 20), Some(2 << 20)]) else {
        return;
    };
    let [first, second] = &gpus;
    let bytes = (1 << 20) + 1;
    let refused = first.alloc(bytes).err().expect("over the limit");
    assert!(
        matches!(
            refused,
            Error::OutOfMemory {
                limit: 0x10_0000,
                ..
            }
        ),
        "{refused}"
    );
    let taken = second.alloc(bytes).expect("within the limit");
    let memory = [first, second].map(Gpu::memory);
    assert_eq!(
        memory,
        [(0, 0, 1 << 20), (bytes as u64, bytes as u64, 2 << 20)]
    );
    drop(taken);
    assert_eq!(second.memory().0, 0);
}
