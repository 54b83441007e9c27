//! The JSON block of a report. `schemas/report.schema.json` describes each key.

use serde::Serialize;

/// Value of `schema`.
pub(crate) const SCHEMA: &str = "moe-analyze.report.v1";

/// The complete block.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    pub schema: &'static str,
    pub title: String,
    pub program: String,
    pub inputs: Vec<InputInfo>,
    pub charts: Vec<Chart>,
    pub notes: Vec<String>,
}

/// An input: everything except its tables.
#[derive(Debug, Serialize)]
pub(crate) struct InputInfo {
    pub name: String,
    pub kind: String,
    pub model: Option<String>,
    pub properties: Vec<(String, String)>,
    pub notes: Vec<String>,
    pub time_unit: TimeUnit,
    pub duration: i64,
    pub layers: Vec<Layer>,
    pub top_k: usize,
    pub files: Vec<File>,
    pub tensors: Vec<Tensor>,
    pub ops: Vec<String>,
    pub names: Vec<String>,
    pub lanes: Vec<&'static str>,
    pub tracks: Vec<Track>,
    pub tokens: Tokens,
    pub graphs: Vec<Graph>,
    pub buffers: Vec<Buffer>,
}

/// Unit of all times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TimeUnit {
    /// Nanoseconds.
    Ns,
    /// Number of the step, for a trace without timestamps.
    Step,
}

#[derive(Debug, Serialize)]
pub(crate) struct Layer {
    pub index: u16,
    pub n_expert: u32,
    pub top_k: u32,
    /// Number of selections of each expert, for a trace that contains only counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selections: Option<Vec<u64>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct File {
    pub name: String,
    pub size: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Tensor {
    pub name: String,
    pub file: u16,
    pub offset: u64,
    pub size: u64,
    pub layer: i32,
    pub category: &'static str,
    pub projection: Option<&'static str>,
    #[serde(rename = "type")]
    pub ty: &'static str,
    pub n_expert: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Track {
    pub name: &'static str,
    pub kind: &'static str,
}

/// Arrays of equal length: one element for each token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Tokens {
    pub text: Vec<Option<String>>,
    pub phase: Vec<u8>,
    pub sequence: Vec<u32>,
    pub position: Vec<u32>,
    pub start: Vec<i64>,
}

impl Tokens {
    /// Keeps the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.text.truncate(n);
        self.phase.truncate(n);
        self.sequence.truncate(n);
        self.position.truncate(n);
        self.start.truncate(n);
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Graph {
    pub phase: &'static str,
    pub width: u32,
    pub height: u32,
    pub nodes: Vec<Node>,
    pub edges: Vec<[usize; 2]>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Node {
    pub x: u32,
    pub y: u32,
    pub w: u32,
    pub h: u32,
    pub label: String,
    pub op: String,
    pub layer: i32,
    pub category: &'static str,
    pub tensor: i32,
    pub shape: Vec<u64>,
    pub dtype: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Buffer {
    pub name: String,
    pub backend: String,
    pub usage: &'static str,
    pub layer: i32,
    pub size: u64,
    pub alloc: i64,
    pub dealloc: Option<i64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Chart {
    pub id: String,
    pub group: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<usize>,
    pub title: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Series>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Axis {
    pub label: String,
    pub scale: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub name: String,
    pub x: Vec<f64>,
    pub y: Vec<Option<f64>>,
    pub style: &'static str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dash: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<usize>,
}

impl Axis {
    /// An axis whose limits are those of the data.
    pub fn new(label: &str, scale: &'static str) -> Axis {
        Axis {
            label: label.to_owned(),
            scale,
            min: None,
            max: None,
        }
    }

    /// An axis from 0 to 100 percent.
    pub fn percent(label: &str) -> Axis {
        Axis {
            min: Some(0.0),
            max: Some(100.0),
            ..Axis::new(label, "linear")
        }
    }
}

impl Series {
    /// A series with these points, whose x must ascend.
    pub fn new(
        name: impl Into<String>,
        style: &'static str,
        points: impl IntoIterator<Item = (f64, Option<f64>)>,
    ) -> Series {
        let (x, y) = points.into_iter().unzip();
        Series {
            name: name.into(),
            x,
            y,
            style,
            dash: false,
            input: None,
        }
    }

    /// A line.
    pub fn line(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Series {
        let points = points.into_iter().map(|(x, y)| (x, Some(y)));
        Series::new(name, "line", points)
    }

    /// The same series as a reference.
    pub fn dashed(mut self) -> Series {
        self.dash = true;
        self
    }
}

/// The number of a layer; -1 for none.
pub(crate) fn layer_or_none(layer: Option<moe_trace::LayerId>) -> i32 {
    layer.map_or(-1, |layer| i32::from(layer.0))
}

/// An index of a list that is shorter than 2^31.
pub(crate) fn index(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// Replaces indices by their new places; -1 and unknown indices become -1.
pub(crate) fn renumber(indices: &mut [i32], places: &[i32]) {
    for index in indices {
        let old = usize::try_from(*index).ok();
        *index = old.and_then(|old| places.get(old)).copied().unwrap_or(-1);
    }
}
