//! Models in several files.

use std::fs;
use std::path::{Path, PathBuf};

use moe_gguf::check::check;
use moe_gguf::map::OffsetMap;
use moe_gguf::{Error, ExpertId, Fault, Gguf, ShardFault};
use moe_testkit::gguf::{F32, I32, Raw, U16};
use tempfile::TempDir;

/// The contents of a shard.
struct Shard<'a> {
    no: u16,
    count: u16,
    n_tensors: i32,
    tensors: &'a [&'a str],
    keys: &'a [(&'a str, &'a str)],
}

fn write(path: &Path, shard: &Shard<'_>) {
    let raw = Raw::new(shard.tensors.len() as u64, shard.keys.len() as u64 + 3);
    let keys = shard.keys.iter();
    let raw = keys
        .fold(raw, |raw, (key, value)| raw.kv_string(key, value))
        .string("split.no")
        .u32(U16)
        .raw(&shard.no.to_le_bytes())
        .string("split.count")
        .u32(U16)
        .raw(&shard.count.to_le_bytes())
        .string("split.tensors.count")
        .u32(I32)
        .raw(&shard.n_tensors.to_le_bytes());
    let tensors = (0..).zip(shard.tensors);
    let raw = tensors.fold(raw, |raw, (i, name)| {
        raw.tensor(name, &[8, 2, 4], F32, 256 * i)
    });
    let data = shard.tensors.iter().map(|name| [name.len() as u8; 256]);
    let data = data.collect::<Vec<_>>().concat();
    fs::write(path, raw.data(32, 0).raw(&data).bytes).unwrap();
}

const FIRST: Shard = Shard {
    no: 0,
    count: 3,
    n_tensors: 3,
    tensors: &[],
    // As written by gguf-split: only the first shard has the keys of the model.
    keys: &[
        ("general.architecture", "qwen3moe"),
        ("general.name", "Mine"),
    ],
};
const SECOND: Shard = Shard {
    no: 1,
    count: 3,
    n_tensors: 3,
    tensors: &["token_embd.weight"],
    keys: &[],
};
const THIRD: Shard = Shard {
    no: 2,
    count: 3,
    n_tensors: 3,
    tensors: &["blk.0.ffn_up_exps.weight", "output.weight"],
    keys: &[],
};

fn path(dir: &TempDir, number: u32) -> PathBuf {
    dir.path().join(format!("model-{number:05}-of-00003.gguf"))
}

/// Writes a model of three files, of which the first has no tensors.
fn model() -> TempDir {
    model_with(SECOND)
}

/// Writes the model with another second shard.
fn model_with(second: Shard) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (number, shard) in [(1, FIRST), (2, second), (3, THIRD)] {
        write(&path(&dir, number), &shard);
    }
    dir
}

fn fault(path: &Path) -> (PathBuf, ShardFault) {
    match Gguf::open(path).unwrap_err() {
        Error::Shard { path, fault } => (path, fault),
        other => panic!("not a fault of a shard: {other}"),
    }
}

#[test]
fn opens_the_model_by_any_shard() {
    let dir = model();
    for number in 1..=3 {
        let gguf = Gguf::open(path(&dir, number)).unwrap();
        assert_eq!(gguf.files().len(), 3);
        assert_eq!(gguf.files()[1].name, "model-00002-of-00003.gguf");
        assert_eq!(
            gguf.metadata().str("general.architecture").unwrap(),
            Some("qwen3moe")
        );

        let places: Vec<_> = gguf
            .tensors()
            .iter()
            .map(|t| (t.index, t.file, t.offset))
            .collect();
        let data = |file: usize| gguf.files()[file].data_offset;
        assert_eq!(
            places,
            [(0, 1, data(1)), (1, 2, data(2)), (2, 2, data(2) + 256)]
        );
        let output = gguf.tensor("output.weight").unwrap();
        assert_eq!(gguf.data(output).unwrap(), [13; 256]);

        let rows = OffsetMap::new(&gguf).rows;
        assert_eq!(rows.len(), 1 + 4 + 1);
        assert_eq!((rows[4].file, rows[4].expert_id), (2, Some(ExpertId(3))));
        assert!(check(&gguf).is_sound() && check(&gguf).llama_cpp_refuses.is_empty());
    }
    let hash = |number| Gguf::open(path(&dir, number)).unwrap().header_xxh3();
    assert_eq!(hash(1), hash(3));
}

#[test]
fn reports_a_missing_shard() {
    let dir = model();
    fs::remove_file(path(&dir, 2)).unwrap();
    let expected = ShardFault::Missing {
        number: 2,
        count: 3,
    };
    assert_eq!(fault(&path(&dir, 3)), (path(&dir, 2), expected));
}

#[test]
fn reports_a_repeated_shard() {
    let dir = model();
    fs::copy(path(&dir, 2), path(&dir, 3)).unwrap();
    let expected = ShardFault::Repeated {
        number: 3,
        found: 2,
    };
    assert_eq!(fault(&path(&dir, 1)), (path(&dir, 3), expected));
}

#[test]
fn reports_a_shard_of_another_split() {
    let dir = model_with(Shard {
        n_tensors: 7,
        ..SECOND
    });
    let (at, fault) = fault(&path(&dir, 1));
    assert_eq!(at, path(&dir, 2));
    assert!(
        matches!(
            fault,
            ShardFault::Foreign {
                key: "split.tensors.count",
                ..
            }
        ),
        "{fault}"
    );
}

#[test]
fn reports_a_shard_with_keys_of_another_model() {
    for (key, found, own) in [
        ("general.architecture", "llama", "qwen3moe"),
        ("general.name", "Another", "Mine"),
    ] {
        let keys = [(key, found)];
        let dir = model_with(Shard {
            keys: &keys,
            ..SECOND
        });
        for number in 1..=3 {
            let expected = ShardFault::Foreign {
                first: path(&dir, 1),
                key,
                found: format!("{found:?}"),
                expected: format!("{own:?}"),
            };
            assert_eq!(fault(&path(&dir, number)), (path(&dir, 2), expected));
        }
        // Equal keys, and keys that the first shard does not have, are accepted.
        let keys = [(key, own), ("general.author", "A. Author")];
        let dir = model_with(Shard {
            keys: &keys,
            ..SECOND
        });
        assert!(Gguf::open(path(&dir, 3)).is_ok());
    }
}

#[test]
fn reports_a_file_without_split_keys() {
    let dir = model();
    fs::write(path(&dir, 2), Raw::new(0, 0).data(32, 0).bytes).unwrap();
    let (at, fault) = fault(&path(&dir, 1));
    assert_eq!(at, path(&dir, 2));
    assert!(
        matches!(
            fault,
            ShardFault::Foreign {
                key: "split.count",
                ..
            }
        ),
        "{fault}"
    );
}

/// llama.cpp#27349: the shards have fewer tensors than `split.tensors.count`.
#[test]
fn reports_a_wrong_number_of_tensors() {
    let dir = model_with(Shard {
        tensors: &[],
        ..SECOND
    });
    let expected = ShardFault::TensorCount {
        found: 2,
        expected: 3,
    };
    assert_eq!(fault(&path(&dir, 1)), (path(&dir, 1), expected));
}

#[test]
fn rejects_a_tensor_in_two_shards() {
    let dir = model_with(Shard {
        tensors: &["output.weight"],
        ..SECOND
    });
    let error = Gguf::open(path(&dir, 1)).unwrap_err();
    let tensor = "output.weight".to_owned();
    assert_eq!(error.fault(), Some(&Fault::DuplicateTensor { tensor }));
}

#[test]
fn reports_a_renamed_shard() {
    let dir = model();
    let renamed = dir.path().join("renamed.gguf");
    fs::rename(path(&dir, 2), &renamed).unwrap();
    let expected = ShardFault::Unnamed {
        number: 2,
        count: 3,
    };
    assert_eq!(fault(&renamed), (renamed.clone(), expected));
}
