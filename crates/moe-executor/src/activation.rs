//! Activations: the f32 buffers that operations read and write, and the names of graph nodes.

use std::fmt;

use moe_trace::LayerId;

use crate::cuda::{DeviceBuffer, Gpu, Ptr};
use crate::device_id::DeviceId;
use crate::mirrored::{Mirrored, PerGpu};

/// Name of a graph node in llama.cpp's spelling: `attn_norm-3`, `result_norm`, `cache_k_l3`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeName {
    stem: &'static str,
    separator: &'static str,
    layer: Option<LayerId>,
    suffix: &'static str,
}

impl NodeName {
    /// A node of a layer, `stem-layer`.
    pub fn of(stem: &'static str, layer: LayerId) -> NodeName {
        NodeName {
            stem,
            separator: "-",
            layer: Some(layer),
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

    /// A cache of a layer, `stemlayer` without a separator.
    pub fn cache(stem: &'static str, layer: LayerId) -> NodeName {
        NodeName {
            stem,
            separator: "",
            layer: Some(layer),
            suffix: "",
        }
    }

    /// The name of a view of the node: `cache_k_l3 (view)`.
    pub fn view(self) -> NodeName {
        NodeName {
            suffix: " (view)",
            ..self
        }
    }

    /// The name of a view of the node after a reshape: `cache_v_l3 (reshaped) (view)`.
    pub fn reshaped_view(self) -> NodeName {
        NodeName {
            suffix: " (reshaped) (view)",
            ..self
        }
    }

    /// The name of the node after a reshape: `ffn_moe_weights-3 (reshaped)`.
    pub fn reshaped(self) -> NodeName {
        NodeName {
            suffix: " (reshaped)",
            ..self
        }
    }

    /// The name of a copy of the node without gaps: `gate-3 (cont)`.
    pub fn copied(self) -> NodeName {
        NodeName {
            suffix: " (cont)",
            ..self
        }
    }

    /// The name of a contiguous copy of the node after a permutation: `fattn_mla-3 (permuted) (cont)`.
    pub fn permuted_copy(self) -> NodeName {
        NodeName {
            suffix: " (permuted) (cont)",
            ..self
        }
    }

    /// A node of a product with LoRA adapters, whose result has this name: `Qcur_lora_a-3`, `result_output_base`.
    pub fn adapter_step(self, step: AdapterStep) -> NodeName {
        let (of_layer, global) = match step {
            AdapterStep::Base => ("_base-", "_base"),
            AdapterStep::A => ("_lora_a-", "_lora_a"),
            AdapterStep::B => ("_lora_b-", "_lora_b"),
            AdapterStep::Scaled => ("_lora-", "_lora"),
            AdapterStep::Sum => ("_lora_sum-", "_lora_sum"),
        };
        match self.layer {
            Some(_) => NodeName {
                separator: of_layer,
                ..self
            },
            None => NodeName {
                suffix: global,
                ..self
            },
        }
    }

    /// Another node of the same layer.
    pub fn stem(self, stem: &'static str) -> NodeName {
        NodeName { stem, ..self }
    }

    /// The layer; `None` for a node outside the layers.
    pub fn layer(&self) -> Option<LayerId> {
        self.layer
    }
}

/// The nodes of a product with LoRA adapters before its result. llama.cpp does not name them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdapterStep {
    /// Product with the weights of the model.
    Base,
    /// Product with the matrix `lora_a` of an adapter.
    A,
    /// Product of this result with the matrix `lora_b`.
    B,
    /// This result, multiplied by the scale of the adapter.
    Scaled,
    /// Sum before the product of the last adapter is added.
    Sum,
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

/// A buffer `(rows, width)` of f32 on the CPU or on a GPU, reused from pass to pass.
pub struct Activation {
    /// Id of the buffer in the trace, constant during a run.
    pub buffer_id: u64,
    /// Name of the node that wrote it last.
    pub name: NodeName,
    /// Elements of a row.
    pub width: usize,
    /// Number of rows.
    pub rows: usize,
    /// The values, row after row.
    pub values: Mirrored<f32>,
    /// On each GPU, the quantized values of an activation with one row.
    quantized: PerGpu<DeviceBuffer>,
    /// The GPU that quantized the row last, and [`Mirrored::written`] of the values at that time.
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

    /// Sets name and shape; the contents are unspecified. Allocates only beyond the largest size so far.
    pub fn shape(&mut self, name: NodeName, width: usize, rows: usize) {
        self.name = name;
        self.width = width;
        self.rows = rows;
        self.values.resize(width * rows);
        self.quantized_on = None;
    }

    /// Address of memory on a GPU for the quantized values of an activation with one row. The kernel that writes the row
    /// must write these values, too; they are valid until the values are written again. Null if the activation has several
    /// rows or an incomplete block, or if the GPU has no memory.
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

    /// Address of the quantized row on this GPU; null if the kernel that wrote the values there did not quantize them.
    pub(crate) fn quantized(&self, gpu: &Gpu) -> Ptr {
        let is_valid = self.quantized_on == Some((gpu.index(), self.values.written()));
        let row = self.quantized.get(gpu.index()).filter(|_| is_valid);
        row.map_or(Ptr::NULL, DeviceBuffer::ptr)
    }

    /// Takes name, shape and values of `other`, whose values are unspecified afterwards.
    pub fn take(&mut self, other: &mut Activation) {
        self.shape(other.name, other.width, other.rows);
        // The quantized row is not taken.
        match other.values.home() {
            DeviceId::Gpu(_) => std::mem::swap(&mut self.values, &mut other.values),
            DeviceId::Cpu => self.data_mut().copy_from_slice(other.data()),
        }
    }

    /// The values in CPU memory, row after row.
    pub fn data(&self) -> &[f32] {
        self.values.host()
    }

    /// The values in CPU memory, mutable.
    pub fn data_mut(&mut self) -> &mut [f32] {
        self.values.host_mut()
    }

    /// One row in CPU memory.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data()[i * self.width..(i + 1) * self.width]
    }

    /// Bytes of the values.
    pub fn size_bytes(&self) -> u64 {
        (self.values.len() * size_of::<f32>()) as u64
    }

    /// Address of the newest values, for the trace.
    pub fn address(&self) -> u64 {
        self.values.address()
    }
}
