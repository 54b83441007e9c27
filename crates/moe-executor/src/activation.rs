//! Buffers that operations read and write, and the names that they carry in a trace.

use std::fmt;

use moe_trace::LayerId;

use crate::cuda::{DeviceBuffer, Gpu, Ptr};
use crate::mirrored::{Mirrored, PerGpu};
use crate::placement::DeviceId;

/// Name of a graph node as llama.cpp spells it: `attn_norm-3`, `result_norm`, `cache_k_l3`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeName {
    stem: &'static str,
    separator: &'static str,
    layer: Option<LayerId>,
    suffix: &'static str,
}

impl NodeName {
    /// A node of a layer, `stem-layer`.
    pub fn of(stem: &'static str, layer: usize) -> NodeName {
        NodeName {
            stem,
            separator: "-",
            layer: Some(LayerId(layer as u16)),
            suffix: "",
        }
    }

    /// A node outside the layers.
    pub fn global(stem: &'static str) -> NodeName {
        NodeName {
            stem,
            separator: "",
            layer: None,
            suffix: "",
        }
    }

    /// A cache of a layer: the number follows the stem directly.
    pub fn cache(stem: &'static str, layer: usize) -> NodeName {
        NodeName {
            stem,
            separator: "",
            layer: Some(LayerId(layer as u16)),
            suffix: "",
        }
    }

    /// The node seen through a view: `cache_k_l3 (view)`.
    pub fn view(self) -> NodeName {
        NodeName {
            suffix: " (view)",
            ..self
        }
    }

    /// The node in another shape: `ffn_moe_weights-3 (reshaped)`.
    pub fn reshaped(self) -> NodeName {
        NodeName {
            suffix: " (reshaped)",
            ..self
        }
    }

    /// The layer, for nodes of a layer.
    pub fn layer(&self) -> Option<LayerId> {
        self.layer
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.stem)?;
        if let Some(layer) = self.layer {
            write!(f, "{}{layer}", self.separator)?;
        }
        f.write_str(self.suffix)
    }
}

/// Rows of f32 that operations fill, on the host or on a GPU; reused from token to token.
pub struct Activation {
    /// Identity of the memory, constant through a run.
    pub buffer_id: u64,
    /// Name of the node that wrote it last.
    pub name: NodeName,
    /// Elements of a row.
    pub width: usize,
    /// Rows.
    pub rows: usize,
    /// The values, row after row.
    pub values: Mirrored<f32>,
    /// One row on a GPU, quantized.
    quantized: PerGpu<DeviceBuffer>,
    /// The GPU that quantized the row last, and which values these were, by [`Mirrored::written`].
    quantized_on: Option<(usize, u64)>,
}

impl Activation {
    /// An empty buffer.
    pub fn new(buffer_id: u64) -> Activation {
        Activation {
            buffer_id,
            name: NodeName::global(""),
            width: 0,
            rows: 0,
            values: Mirrored::default(),
            quantized: PerGpu::default(),
            quantized_on: None,
        }
    }

    /// Makes it `rows` rows of `width`, contents unspecified. Allocates only to grow beyond any earlier size.
    pub fn shape(&mut self, name: NodeName, width: usize, rows: usize) {
        self.name = name;
        self.width = width;
        self.rows = rows;
        self.values.resize(width * rows);
        self.quantized_on = None;
    }

    /// Room on a GPU for the row of an activation that has one alone, quantized: the kernel that is about to write the row
    /// there must write this, too. Null where a row cannot be quantized, or there is no memory. It holds until the values are
    /// written again.
    pub(crate) fn fill_quantized(&mut self, gpu: &Gpu) -> Ptr {
        if self.rows != 1 || !self.width.is_multiple_of(32) {
            return Ptr::NULL;
        }
        let index = gpu.index();
        let before = self.quantized.set(index, None);
        self.quantized
            .set(index, gpu.quantized_row(self.width, before));
        self.quantized_on = Some((index, self.values.written()));
        self.quantized(gpu)
    }

    /// The row quantized on this GPU, if the kernel that made it there did that; or null.
    pub(crate) fn quantized(&self, gpu: &Gpu) -> Ptr {
        let is_theirs = self.quantized_on == Some((gpu.index(), self.values.written()));
        let row = self.quantized.get(gpu.index()).filter(|_| is_theirs);
        row.map_or(Ptr::NULL, DeviceBuffer::ptr)
    }

    /// Takes name, shape and contents of another buffer, whose own are no longer of use.
    pub fn take(&mut self, other: &mut Activation) {
        self.shape(other.name, other.width, other.rows);
        // The quantized row stays with the other.
        match other.values.home() {
            DeviceId::Gpu(_) => std::mem::swap(&mut self.values, &mut other.values),
            DeviceId::Cpu => self.data_mut().copy_from_slice(other.data()),
        }
    }

    /// All rows on the host, row after row.
    pub fn data(&self) -> &[f32] {
        self.values.host()
    }

    /// All rows on the host, to write.
    pub fn data_mut(&mut self) -> &mut [f32] {
        self.values.host_mut()
    }

    /// One row on the host.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data()[i * self.width..(i + 1) * self.width]
    }

    /// Bytes in use.
    pub fn size_bytes(&self) -> u64 {
        (self.values.len() * size_of::<f32>()) as u64
    }

    /// Address, for the trace.
    pub fn address(&self) -> u64 {
        self.values.address()
    }
}
