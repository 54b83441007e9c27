//! The GPU as a session uses it: what lies there, what is computed there, and when.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};
use half::f16;
use moe_gguf::{GgmlType, Gguf};
use zerocopy::IntoBytes;

use super::download::{Download, Downloads};
use super::launch::{Kernels, Weights};
use super::post_fetch::{PostFetch, Sample, Settings};
use super::{DeviceBuffer, Error, Gpu, Pinned, Ptr, Registered, Result};
use crate::cpu::quant::dequantize_row;
use crate::placement::{Placement, Side};
use crate::recorder::Routing;
use crate::weights::{Matrix, Vector};

/// Bytes behind a matrix that a kernel may read and does not use.
const SLACK: usize = 256;
/// Elements that are converted for the GPU at a time.
const CONVERTED: usize = 1 << 20;

/// The GPU as a session uses it. Weights are copied to it when they are first asked for.
pub struct Device<'g> {
    pub(crate) gpu: Gpu,
    placement: Placement,
    /// By index in the GGUF's tensor table; none where there was no room.
    matrices: HashMap<u32, Option<Resident>>,
    vectors: HashMap<u32, DeviceBuffer>,
    scratch: [Option<DeviceBuffer>; Scratch::ALL],
    positions: Vec<u32>,
    marks: Marks,
    downloads: Downloads,
    /// What becomes of experts that live with the host.
    policy: Policy,
    /// Transfers beside the host's work, with the policy that has them.
    pub(crate) post_fetch: Option<PostFetch>,
    /// Stacks whose file could not be registered, copied to memory that the GPU reads by itself.
    pinned: HashMap<u32, Option<Pinned>>,
    /// Rows of a product from which a matrix of the host is copied to the GPU for it.
    min_batch: Option<usize>,
    /// Files whose memory the GPU reads by itself. Dropped before the files, which outlive `'g`.
    registered: Vec<Registered>,
    mapped: std::marker::PhantomData<&'g Gguf>,
    /// What went wrong and was done by the host.
    pub fallbacks: Fallbacks,
}

/// What went wrong on the GPU and was done by the host.
#[derive(Debug, Default, Clone)]
pub struct Fallbacks {
    /// Operations.
    pub ops: u64,
    /// Tensors that found no room.
    pub tensors: Vec<String>,
    /// The first error.
    pub first: Option<String>,
}

/// A matrix in the GPU's memory.
struct Resident {
    buffer: DeviceBuffer,
    ty: GgmlType,
    row_size: usize,
}

/// What becomes of the chosen experts whose weights live with the host, when there are few rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// The host computes them.
    #[default]
    Cpu,
    /// They are copied to the GPU when they are chosen, and computed there.
    Gpu,
    /// The host computes gate and up while down is copied to the GPU.
    PostFetch,
}

/// Memory that kernels use beside what they read and write.
#[derive(Clone, Copy)]
pub enum Scratch {
    /// Quantized activations.
    Quantized,
    /// Rows grouped by expert.
    Worklist,
    /// Partial results of attention.
    Attention,
    /// Positions of the rows.
    Positions,
    /// Numbers of the rows that are wanted.
    Rows,
    /// Experts that were copied for one product: of gate, up and down.
    Gate,
    /// Of up.
    Up,
    /// Of down.
    Down,
    /// Addresses of matrices.
    Table,
}

impl Scratch {
    const ALL: usize = Scratch::Table as usize + 1;
}

/// A moment on the GPU's stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark(usize);

/// The moments of a pass. Events are made once and recorded anew in every pass.
#[derive(Default)]
struct Marks {
    events: Vec<CudaEvent>,
    used: usize,
    /// Whether the host did something since the last.
    is_stale: bool,
    /// When the first was recorded, with nothing before it on the stream.
    origin: Option<Instant>,
}

impl<'g> Device<'g> {
    /// A GPU on which the tensors live that `placement` says. For products of `min_batch` rows or more the others are copied
    /// to it, too (llama.cpp's `GGML_OP_OFFLOAD_MIN_BATCH`, 32 there).
    pub fn new(
        gpu: Gpu,
        placement: Placement,
        policy: Policy,
        min_batch: Option<usize>,
    ) -> Device<'g> {
        Device {
            gpu,
            placement,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            scratch: [const { None }; Scratch::ALL],
            positions: Vec::new(),
            marks: Marks::default(),
            policy,
            post_fetch: None,
            pinned: HashMap::new(),
            min_batch,
            downloads: Downloads::default(),
            registered: Vec::new(),
            mapped: std::marker::PhantomData,
            fallbacks: Fallbacks::default(),
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The kernels.
    pub fn kernels(&self) -> &Kernels {
        self.gpu.kernels()
    }

    /// The stream that computes.
    pub fn stream(&self) -> &CudaStream {
        self.gpu.stream()
    }

    /// Where tensors live.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Has the down matrices of chosen experts travel while the host computes the others, with [`Policy::PostFetch`].
    ///
    /// # Errors
    /// The driver has no stream left.
    pub fn with_post_fetch(mut self, settings: Settings) -> Result<Device<'g>> {
        self.policy = Policy::PostFetch;
        self.post_fetch = Some(PostFetch::new(&self.gpu, settings)?);
        Ok(self)
    }

    /// What the layers of this pass transferred, once the pass is over.
    ///
    /// # Errors
    /// The GPU's work failed.
    pub fn samples(&self) -> Result<Vec<Sample>> {
        let post_fetch = self.post_fetch.as_ref();
        post_fetch.map_or(Ok(Vec::new()), |fetch| fetch.samples(&self.gpu))
    }

    /// Bytes of the memory that transfers go to.
    pub fn scratchpad_bytes(&self) -> usize {
        self.post_fetch.as_ref().map_or(0, PostFetch::pad_bytes)
    }

    /// Begins the transfers of the chosen experts of a stack that lives with the host. Gives whether there are any: the
    /// policy, the number of rows and the type must allow it.
    pub(crate) fn begin_post_fetch(
        &mut self,
        il: usize,
        stack: &Matrix,
        ids: &[i32],
        tokens: usize,
    ) -> bool {
        let registered = !self.registered.is_empty();
        let pinned = match registered || self.post_fetch.is_none() {
            true => None,
            false => pinned_copy(&self.gpu, &mut self.pinned, stack),
        };
        let Some(post_fetch) = &mut self.post_fetch else {
            return false;
        };
        let size = stack.row_size * stack.n_out;
        let bytes_of = |expert: i32| match pinned {
            Some(copy) => &copy[expert as usize * size..][..size],
            None => stack.rows(expert as usize, 0..stack.n_out),
        };
        if let Some(error) = post_fetch.begin(&self.gpu, il, ids, tokens, size, bytes_of) {
            self.fallbacks.ops += 1;
            self.fallbacks.note(&error);
        }
        true
    }

    /// Has the GPU read the model's mapped files by itself. Gives whether the driver allows it; without, copies of weights
    /// run at a fraction of the link's speed.
    pub fn register(&mut self, gguf: &'g Gguf) -> bool {
        if self.registered.is_empty() {
            let files = gguf.files().iter();
            let registered: Result<Vec<Registered>> = files
                .map(|file| self.gpu.register(file.contents()))
                .collect();
            self.registered = registered.unwrap_or_default();
        }
        !self.registered.is_empty()
    }

    /// Whether a matrix lives on the GPU. One that finds no room there is told and stays with the host.
    pub fn holds(&mut self, matrix: &Matrix) -> bool {
        self.matrix_if_resident(matrix).is_some()
    }

    /// The matrix on the GPU, copied there now if it was not yet, if it finds room.
    pub fn matrix(&mut self, matrix: &Matrix) -> Option<Weights> {
        let index = matrix.place.tensor_idx;
        if !self.matrices.contains_key(&index) {
            let resident = match self.upload(matrix) {
                Ok(resident) => Some(resident),
                Err(error) => {
                    self.fallbacks.tensors.push(matrix.place.name.clone());
                    self.fallbacks.note(&error);
                    None
                }
            };
            self.matrices.insert(index, resident);
        }
        let resident = self.matrices[&index].as_ref()?;
        Some(Weights {
            ptr: resident.buffer.ptr(),
            ty: resident.ty,
            n_in: matrix.n_in,
            n_out: matrix.n_out,
            row_size: resident.row_size,
            expert_size: resident.row_size * matrix.n_out,
        })
    }

    /// Whether a matrix that lives with the host is copied to the GPU for a product of `rows` rows.
    pub fn copies_for(&self, matrix: &Matrix, rows: usize) -> bool {
        self.min_batch.is_some_and(|min| rows >= min) && Kernels::supports(matrix.ty)
    }

    /// The matrix on the GPU: where it lives there, or a copy for one product.
    ///
    /// # Errors
    /// There is no room, or a copy failed.
    pub fn matrix_or_copy(&mut self, matrix: &Matrix) -> Result<Weights> {
        match self.matrix_if_resident(matrix) {
            Some(weights) => Ok(weights),
            None => self.fetch(matrix, &[0], Scratch::Gate),
        }
    }

    fn upload(&self, matrix: &Matrix) -> Result<Resident> {
        let rows = matrix.n_out * matrix.n_expert;
        if Kernels::supports(matrix.ty) {
            let bytes = matrix.all();
            let buffer = self.gpu.alloc(bytes.len() + SLACK)?;
            self.gpu.upload(buffer.ptr(), bytes)?;
            return Ok(Resident {
                buffer,
                ty: matrix.ty,
                row_size: matrix.row_size,
            });
        }
        // A type without a kernel of its own there goes as F16.
        let row_size = matrix.n_in * size_of::<f16>();
        let buffer = self.gpu.alloc(rows * row_size + SLACK)?;
        let at_once = (CONVERTED / matrix.n_in).max(1);
        let (mut values, mut halves) = (vec![0.0; matrix.n_in], Vec::new());
        for (i, chunk) in matrix.all().chunks(at_once * matrix.row_size).enumerate() {
            halves.clear();
            for row in chunk.chunks_exact(matrix.row_size) {
                dequantize_row(matrix.ty, row, &mut values)
                    .expect("the matrix has a kernel, so its type can be read");
                halves.extend(values.iter().map(|&v| f16::from_f32(v).to_bits()));
            }
            let at = buffer.ptr().offset(i * at_once * row_size);
            self.gpu.upload(at, halves.as_bytes())?;
        }
        Ok(Resident {
            buffer,
            ty: GgmlType::F16,
            row_size,
        })
    }

    /// The chosen experts of a stack that lives with the host, copied into `scratch` at their places in the stack.
    ///
    /// # Errors
    /// There is no room, or a copy failed; or the type has no kernel.
    pub fn fetch(&mut self, matrix: &Matrix, ids: &[i32], scratch: Scratch) -> Result<Weights> {
        if !Kernels::supports(matrix.ty) {
            return Err(Error::Unsupported {
                kernel: "mul_mat",
                what: format!("type {}", matrix.ty.name()),
            });
        }
        let expert_size = matrix.row_size * matrix.n_out;
        let room = self.scratch(scratch, expert_size * matrix.n_expert + SLACK)?;
        let mut wanted = vec![false; matrix.n_expert];
        ids.iter().for_each(|&id| wanted[id as usize] = true);
        for (expert, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let bytes = matrix.rows(expert, 0..matrix.n_out);
            self.gpu.upload(room.offset(expert * expert_size), bytes)?;
        }
        Ok(Weights {
            ptr: room,
            ty: matrix.ty,
            n_in: matrix.n_in,
            n_out: matrix.n_out,
            row_size: matrix.row_size,
            expert_size,
        })
    }

    /// A vector on the GPU.
    ///
    /// # Errors
    /// There is no room, or the copy failed.
    pub fn vector(&mut self, vector: &Vector) -> Result<Ptr> {
        let index = vector.place.tensor_idx;
        if let Some(buffer) = self.vectors.get(&index) {
            return Ok(buffer.ptr());
        }
        let buffer = self
            .gpu
            .alloc(size_of_val(vector.data.as_slice()) + SLACK)?;
        self.gpu.upload(buffer.ptr(), vector.data.as_slice())?;
        Ok(self.vectors.entry(index).or_insert(buffer).ptr())
    }

    /// A vector that may be missing; none is [`Ptr::NULL`].
    ///
    /// # Errors
    /// As [`Device::vector`].
    pub fn optional(&mut self, vector: Option<&Vector>) -> Result<Ptr> {
        vector.map_or(Ok(Ptr::NULL), |vector| self.vector(vector))
    }

    /// Memory for a kernel, at least `bytes`, contents unspecified.
    ///
    /// # Errors
    /// There is no room.
    pub fn scratch(&mut self, which: Scratch, bytes: usize) -> Result<Ptr> {
        let room = &mut self.scratch[which as usize];
        if let Some(buffer) = room
            && buffer.size_bytes() >= bytes
        {
            return Ok(buffer.ptr());
        }
        // The old one goes first: both at once may not fit.
        *room = None;
        let buffer = self.gpu.alloc(bytes.max(1).next_multiple_of(1 << 16))?;
        Ok(room.insert(buffer).ptr())
    }

    /// The positions of a pass's rows on the GPU.
    ///
    /// # Errors
    /// There is no room, or the copy failed.
    pub fn positions(&mut self, positions: &[u32]) -> Result<Ptr> {
        let room = self.scratch[Scratch::Positions as usize].as_ref();
        let before = room.map(DeviceBuffer::ptr);
        let ptr = self.scratch(Scratch::Positions, size_of_val(positions))?;
        if self.positions != positions || before != Some(ptr) {
            self.gpu.upload(ptr, positions)?;
            self.positions.clear();
            self.positions.extend(positions);
        }
        Ok(ptr)
    }

    /// The experts of a choice on the GPU: where they live there, or copies in `scratch`, for which the host must know the
    /// choice.
    ///
    /// # Errors
    /// As [`Device::fetch`].
    pub fn experts(
        &mut self,
        matrix: &Matrix,
        routing: &Routing,
        scratch: Scratch,
    ) -> Result<Weights> {
        match self.matrix_if_resident(matrix) {
            Some(weights) => Ok(weights),
            None => self.fetch(matrix, routing.ids.host(), scratch),
        }
    }

    fn matrix_if_resident(&mut self, matrix: &Matrix) -> Option<Weights> {
        match self.placement.tensor(&matrix.place) {
            Side::Gpu => self.matrix(matrix),
            Side::Host => None,
        }
    }

    /// Memory for the activations of a product of `rows` rows of `n_in` elements.
    ///
    /// # Errors
    /// There is no room.
    pub fn quantized(&mut self, rows: usize, n_in: usize) -> Result<Ptr> {
        self.scratch(Scratch::Quantized, Kernels::scratch_size(rows, n_in))
    }

    /// Memory for the rows of a choice, grouped by expert.
    ///
    /// # Errors
    /// There is no room.
    pub fn worklist(&mut self, routing: &Routing, n_expert: usize) -> Result<Ptr> {
        let k = routing.n_expert_used;
        let bytes = Kernels::work_size(routing.ids.len() / k.max(1), k, n_expert);
        self.scratch(Scratch::Worklist, bytes)
    }

    /// What becomes of experts that live with the host.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Begins to copy a choice to the host, for the records; nobody waits for it before the pass is over.
    ///
    /// # Errors
    /// There is no memory, or the copy failed.
    pub fn begin_download(&mut self, routing: &mut Routing) -> Result<()> {
        let n = routing.ids.len();
        let ids = routing.ids.device(&self.gpu)?;
        let weights = routing.weights.device(&self.gpu)?;
        routing.copy = Some(self.downloads.begin(&self.gpu, ids, weights, n)?);
        Ok(())
    }

    /// Experts and weights that were copied, once the stream has come so far.
    pub fn downloaded(&self, download: &Download) -> (&[i32], &[f32]) {
        self.downloads.get(download)
    }

    /// Begins a pass; nothing is under way on the stream.
    ///
    /// # Errors
    /// An event cannot be made or recorded.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.downloads.clear();
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.begin_pass(&self.gpu)?;
        }
        self.begin_marks()
    }

    /// Begins the moments of a pass anew; nothing is under way on the stream.
    ///
    /// # Errors
    /// An event cannot be made or recorded.
    fn begin_marks(&mut self) -> Result<()> {
        self.marks.used = 0;
        self.mark()?;
        self.marks.origin = Some(Instant::now());
        Ok(())
    }

    /// A moment of the stream, from here on.
    ///
    /// # Errors
    /// An event cannot be made or recorded.
    pub fn mark(&mut self) -> Result<Mark> {
        let at = self.marks.used;
        if at == self.marks.events.len() {
            self.marks.events.push(self.gpu.event()?);
        }
        self.marks.events[at]
            .record(self.gpu.stream())
            .map_err(|source| Error::driver("an event", source))?;
        self.marks.used += 1;
        self.marks.is_stale = false;
        Ok(Mark(at))
    }

    /// The last moment if the GPU went on from there, or a new one.
    ///
    /// # Errors
    /// As [`Device::mark`].
    pub fn last_mark(&mut self) -> Result<Mark> {
        if self.marks.is_stale || self.marks.used == 0 {
            return self.mark();
        }
        Ok(Mark(self.marks.used - 1))
    }

    /// The host did something while the GPU waited.
    pub fn host_took_over(&mut self) {
        self.marks.is_stale = true;
    }

    /// When a moment of this pass was, once the stream has come so far.
    ///
    /// # Errors
    /// The GPU's work failed.
    pub fn time(&self, mark: Mark) -> Result<Instant> {
        let events = &self.marks.events;
        let since = events[0].elapsed_ms(&events[mark.0]);
        let since = since.map_err(|source| Error::driver("an event's time", source))?;
        let since = Duration::from_nanos((f64::from(since).max(0.0) * 1e6) as u64);
        Ok(self.marks.origin.unwrap_or_else(Instant::now) + since)
    }
}

/// A stack in memory that the GPU reads by itself, copied there when it is first asked for; none if there is no memory.
fn pinned_copy<'p>(
    gpu: &Gpu,
    pinned: &'p mut HashMap<u32, Option<Pinned>>,
    stack: &Matrix,
) -> Option<&'p [u8]> {
    let copy = pinned.entry(stack.place.tensor_idx).or_insert_with(|| {
        let mut copy = gpu.pinned(stack.all().len()).ok()?;
        copy.bytes_mut().copy_from_slice(stack.all());
        Some(copy)
    });
    copy.as_ref().map(Pinned::bytes)
}

impl Fallbacks {
    /// Keeps the first error.
    pub(crate) fn note(&mut self, error: &Error) {
        self.first.get_or_insert_with(|| error.to_string());
    }
}
