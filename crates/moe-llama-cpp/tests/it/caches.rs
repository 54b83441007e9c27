//! Executor and llama.cpp agree with a KV cache of the same type.

use llama_cpp_sys_2 as sys;
use moe_executor::CacheType;
use moe_gguf::Gguf;

use crate::compare::{Distance, Exact, ours, theirs};
use crate::engines::{PLAIN, Variant};
use crate::models::{fixture, make, small};

#[test]
fn agree_with_f16_caches() {
    let mut exact = Exact::default();
    for arch in ["dots1", "gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe"] {
        let name = format!("random-{arch}-F16");
        exact.compare_with_f16_cache(&name, &fixture(format!("{name}.gguf")));
    }
    let dir = tempfile::tempdir().unwrap();
    for like in ["gpt-oss-20b", "qwen3-30b-a3b"] {
        let path = make(dir.path(), like, &small(like, "F16"));
        exact.compare_with_f16_cache(like, &path);
    }
    exact.check_all();
}

/// llama.cpp needs flash attention for values in Q8_0, and it also quantizes queries, which the executor does not. The distance
/// between the engines may be at most 1.25 times the distance that the cache makes in llama.cpp.
#[test]
fn agree_with_q8_0_caches() {
    let dir = tempfile::tempdir().unwrap();
    for like in ["gpt-oss-20b", "qwen3-30b-a3b"] {
        let path = make(dir.path(), like, &small(like, "F16"));
        let gguf = Gguf::open(&path).unwrap();
        let quantized = Variant {
            flash_attention: true,
            cache: CacheType::Q8_0,
        };
        let [plain, theirs] = theirs(&gguf, [PLAIN, quantized]);
        let own = Distance::of(&plain, &theirs);
        let distance = Distance::of(&theirs, &ours(&gguf, CacheType::Q8_0));
        println!("{like:24} ours {distance}");
        println!("{like:24} own  {own}");
        assert!(own.mean_top5() > 0.0, "{like}: {own}");
        assert!(
            distance.mean_top5() <= 1.25 * own.mean_top5(),
            "{like}: {distance}, {own}"
        );
        assert!(distance.widest_tie < 0.5, "{like}: {distance}");
    }
}

/// Rows of the cache have the same bytes as in ggml.
#[test]
fn rows_are_converted_like_in_ggml() {
    let values: Vec<f32> = (0..4096)
        .map(|i| {
            let x = (i as f32 * 0.7391).sin() * 3.0;
            // Blocks of zeros, and halves between two codes.
            match i / 32 % 8 {
                0 => 0.0,
                1 if i % 32 == 0 => 127.0,
                1 => (i % 32) as f32 - 0.5,
                _ => x * x * x,
            }
        })
        .collect();
    for ty in [CacheType::F16, CacheType::Q8_0] {
        let mut want = vec![0u8; ty.ggml().row_size(values.len() as u64).unwrap() as usize];
        // SAFETY: the traits of a type are constants.
        let from_float = unsafe { (*sys::ggml_get_type_traits_cpu(ty.ggml().id())).from_float };
        // SAFETY: the row has the size of all values.
        unsafe {
            let n = values.len() as i64;
            from_float.unwrap()(values.as_ptr(), want.as_mut_ptr().cast(), n);
        }
        let mut got = vec![0; want.len()];
        ty.convert(&values, &mut got);
        assert_eq!(got, want, "{ty}");
    }
}
