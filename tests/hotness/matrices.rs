//! Matrices, unsplit and split, in every format.

use std::fs::{self, File};

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, UInt32Type, UInt64Type};
use moe_gguf::Gguf;
use moe_gguf::experts::expert_bytes;
use moe_gguf::map::OffsetMap;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use super::Fixture;
use crate::support::{
    ALL, N_EXPERT, N_GENERATED, N_LAYER, N_PROMPT, arg, args, fail, known_counts, repository, run,
};

/// Returns the data of a `.npy` file of 64-bit numbers, and its header.
fn npy(bytes: &[u8]) -> (String, Vec<[u8; 8]>) {
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8(bytes[10..10 + length].to_vec()).unwrap();
    let numbers = bytes[10 + length..].chunks_exact(8);
    assert!(numbers.remainder().is_empty());
    (header, numbers.map(|bytes| bytes.try_into().unwrap()).collect())
}

#[test]
fn arrays_contain_counts_and_mass() {
    let fixture = Fixture::new();
    let (counts, mass) = (fixture.path("counts.npy"), fixture.path("mass.npy"));
    let run = fixture.path("run");
    run!["hotness", run, "--matrix", counts];
    run!["hotness", run, "--matrix", mass, "--value", "mass"];

    let (header, numbers) = npy(&fs::read(&counts).unwrap());
    assert!(header.contains("'descr': '<u8'") && header.contains("'shape': (6, 32)"), "{header}");
    let known = known_counts(&ALL);
    for (at, number) in (0..).zip(&numbers) {
        let known = known.get(&(at / N_EXPERT, at % N_EXPERT)).copied();
        assert_eq!(u64::from_le_bytes(*number), known.unwrap_or(0));
    }
    assert_eq!(numbers.len() as u32, N_LAYER * N_EXPERT);

    let (header, numbers) = npy(&fs::read(&mass).unwrap());
    assert!(header.contains("'descr': '<f8'"), "{header}");
    // Expert 3 of layer 0: 16 tokens with ½.
    assert_eq!(f64::from_le_bytes(numbers[3]), 8.0);
    // The array can be read as a trace of counts.
    let again = run!["--quiet", "hotness", counts, "-o", "csv"];
    let first = again.lines().nth(1).unwrap();
    assert!(first.starts_with("0,3,16,0.25,"), "{first}");
}

#[test]
fn splits_by_phase_sequence_and_window() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    let cells = |more: &[&str]| -> Vec<Vec<String>> {
        let args = args!["hotness", run, "-o", "csv", more];
        let text = run![args];
        let lines = text
            .lines()
            .map(|line| line.split(',').map(str::to_owned).collect());
        lines.collect()
    };
    let phases = cells(&["--by", "phase"]);
    assert_eq!(phases[0], ["phase", "layer_id", "expert_id", "count", "mass", "bytes"]);
    assert_eq!(phases.len() as u32, 1 + 2 * N_LAYER * N_EXPERT);
    let of = |rows: &[Vec<String>], part: &str, layer: &str, expert: &str| -> u64 {
        let mut found = rows.iter().filter(|row| row[..3] == [part, layer, expert]);
        found.next().unwrap()[3].parse().unwrap()
    };
    assert_eq!(of(&phases, "prompt", "0", "3"), u64::from(N_PROMPT));
    assert_eq!(of(&phases, "generate", "0", "3"), u64::from(N_GENERATED));
    assert_eq!(of(&phases, "prompt", "5", "3"), 1);

    let windows = cells(&["--by", "window", "--window", "5"]);
    assert_eq!(
        windows.len() as u32,
        1 + 4 * N_LAYER * N_EXPERT,
        "16 tokens are 3 windows and a token"
    );
    assert_eq!(of(&windows, "0", "0", "3"), 5);
    assert_eq!(of(&windows, "3", "0", "3"), 1);
    // Every even token selects expert 20: 0, 2, 4 and 6, 8.
    assert_eq!((of(&windows, "0", "0", "20"), of(&windows, "1", "0", "20")), (3, 2));

    let sequences = cells(&["--by", "sequence"]);
    assert_eq!(of(&sequences, "0", "0", "3"), 16);

    let array = fixture.path("parts.npy");
    run!["hotness", run, "--by", "phase", "--matrix", array];
    let (header, numbers) = npy(&fs::read(&array).unwrap());
    assert!(header.contains("'shape': (2, 6, 32)"), "{header}");
    assert_eq!(u64::from_le_bytes(numbers[3]), u64::from(N_PROMPT));
}

/// A token without a sequence does not belong to sequence 0: it has a separate part and no label, and does not follow its tokens.
#[test]
fn unknown_sequence_differs_from_sequence_0() {
    let fixture = Fixture::new();
    let (path, labels) = (fixture.path("mixed.jsonl"), fixture.path("labels.csv"));
    let lines = [
        "{\"t\":0,\"layer\":0,\"experts\":[1,2],\"seq\":0}\n",
        "{\"t\":1,\"layer\":0,\"experts\":[1,2]}\n",
        "{\"t\":0,\"layer\":0,\"experts\":[1,3],\"seq\":7}\n",
    ];
    fs::write(&path, lines.concat()).unwrap();
    fs::write(&labels, "0,code\n7,law\n").unwrap();
    let count = |rows: &[Value], part: [&str; 2], expert: u32| {
        let mut found = rows
            .iter()
            .filter(|row| row[part[0]] == part[1] && row["expert_id"] == expert);
        found.next().unwrap()["count"].as_u64().unwrap()
    };
    let rows = |more: &[&str]| -> Vec<Value> {
        let text = run!["--quiet", "hotness", path, "-o", "json", more];
        serde_json::from_str(&text).unwrap()
    };
    let parts = rows(&["--by", "sequence"]);
    for (sequence, expected) in [("0", [1, 1, 0]), ("unknown", [1, 1, 0]), ("7", [1, 0, 1])] {
        let found = [1, 2, 3].map(|expert| count(&parts, ["sequence", sequence], expert));
        assert_eq!(found, expected, "sequence {sequence}");
    }
    let parts = rows(&["--by", "label", "--labels", arg(&labels)]);
    for (label, expected) in [("code", [1, 1, 0]), ("(none)", [1, 1, 0]), ("law", [1, 0, 1])] {
        let found = [1, 2, 3].map(|expert| count(&parts, ["label", label], expert));
        assert_eq!(found, expected, "label {label}");
    }
}

/// Bytes from the run's map and from the model file are equal: the size of an expert times its activations.
#[test]
fn bytes_match_the_model() {
    let fixture = Fixture::new();
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let sizes = expert_bytes(&OffsetMap::new(&Gguf::open(&model).unwrap()));
    let known = known_counts(&ALL);
    let of_map = fixture.path("map.parquet");
    let of_model = fixture.path("model.parquet");
    run!["hotness", fixture.path("run"), "--matrix", of_map];
    let tables = fixture.path("tables");
    run!["hotness", tables, "--model", model, "--matrix", of_model];
    for file in [of_map, of_model] {
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(file).unwrap()).unwrap();
        let batches: Vec<RecordBatch> = reader.build().unwrap().map(Result::unwrap).collect();
        assert_eq!(batches.len(), 1);
        let batch = &batches[0];
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let layer_id = column("layer_id").as_primitive::<UInt32Type>();
        let expert_id = column("expert_id").as_primitive::<UInt32Type>();
        let count = column("count").as_primitive::<UInt64Type>();
        let bytes = column("bytes").as_primitive::<UInt64Type>();
        assert_eq!(column("mass").as_primitive::<Float64Type>().value(3), 8.0);
        assert_eq!(batch.num_rows(), sizes.len());
        for (row, (&(layer, expert), size)) in sizes.iter().enumerate() {
            let cell = (u32::from(layer.0), expert.0);
            assert_eq!((layer_id.value(row), expert_id.value(row)), cell);
            let known = known.get(&cell).copied().unwrap_or(0);
            assert_eq!(count.value(row), known);
            assert_eq!(bytes.value(row), known * size);
        }
    }
    let out = fixture.path("bytes.npy");
    let line = fail!["hotness", tables, "--value", "bytes", "--matrix", out];
    assert!(line.contains("--model"), "{line}");
    assert!(!out.exists());
}

#[test]
fn rejects_outputs_before_reading() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    let bad = fixture.path("matrix.xlsx");
    assert!(fail!["hotness", run, "--matrix", bad].contains(".parquet"));
    let there = fixture.path("there.csv");
    fs::write(&there, "precious").unwrap();
    assert!(fail!["hotness", run, "--matrix", there].contains("--force"));
    // Options without effect are rejected.
    for (more, expected) in [
        (&["--by", "phase"][..], "--matrix"),
        (&["--by", "phase", "--table", "measures"], "--matrix"),
        (&["--plot-kind", "entropy"], "--plot"),
        (&["--label", "a"], "--by label"),
        (&["--sorted"], "--plot"),
        (&["--value", "mass"], "--plot"),
    ] {
        let line = fail!["hotness", run, more];
        assert!(line.contains(expected), "{more:?}: {line}");
    }
    assert!(fail!["hotness", run, "--by", "window"].contains("--window"));
    assert!(fail!["hotness", run, "--window", "3"].contains("--by window"));
    run!["hotness", run, "--matrix", there, "--force"];
    let csv = fs::read_to_string(there).unwrap();
    assert!(csv.starts_with("layer_id,expert_id,count,mass,bytes\n0,0,0,"), "{csv}");
}

#[test]
fn draws_every_kind_of_plot() {
    let fixture = Fixture::new();
    let run = fixture.path("run");
    for (picture, more, text) in [
        ("heat-map", "--sorted", "hottest first"),
        ("heat-map", "--value=bytes", "Bytes read of each expert"),
        ("entropy", "--sorted", "entropy (1 = uniform)"),
    ] {
        for extension in ["svg", "png"] {
            let out = fixture.path(&format!("{picture}.{extension}"));
            let args =
                args!["hotness", run, "--plot", out, "--plot-kind", picture, more, "--force"];
            run![args];
            let bytes = fs::read(out).unwrap();
            match extension {
                "svg" => {
                    let svg = String::from_utf8(bytes).unwrap();
                    assert!(svg.contains(text) && svg.trim_end().ends_with("</svg>"), "{picture}");
                }
                _ => assert!(bytes.ends_with(b"IEND\xaeB`\x82")),
            }
        }
    }
}
