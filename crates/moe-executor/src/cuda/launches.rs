//! Launches of kernels on the compute stream of a GPU.
//!
//! Each pass that decodes a token launches the same kernels, mostly with the same arguments. A launch costs the CPU several
//! microseconds, more than a small kernel takes. So a pass that repeats an earlier one collects its launches instead, and starts
//! them together as CUDA graphs. A graph ends at a number of launches, so that the GPU computes while the CPU continues, and
//! before everything else on the stream: a copy, an event, a wait.
//!
//! A launch without a counterpart in the earlier pass is started at once, like all launches of a pass that is not collected.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, sys};

use super::graph::Graph;
use super::{DriverStatus, Error, Ptr, Result};

/// Largest number of parameters of a kernel.
pub(super) const MAX_PARAMS: usize = 28;
/// Number of launches in the first graphs of a pass, which are short so that the GPU starts early, and in all others.
const FIRST_SEGMENTS: [usize; 2] = [24, 48];
const SEGMENT: usize = 96;
/// Fewer launches are not worth a graph.
const MIN_GRAPH: usize = 12;
/// Largest number of tokens of a pass that is collected. Kernels for more tokens take longer than their launches.
const MAX_TOKENS: usize = 32;

/// A kernel with its arguments.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub kernel: &'static str,
    /// The source file of the kernel.
    pub module: &'static str,
    pub grid: LaunchConfig,
    /// Whether it may start while the previous kernel still runs.
    pub overlaps: bool,
    /// Arguments as their low bytes, the last one the address for the start; and then zeros.
    pub params: [u64; MAX_PARAMS],
    pub n_params: usize,
}

/// A launch of a kernel.
pub(super) struct Launch {
    pub call: Call,
    pub function: CudaFunction,
    /// The function of the kernel that may compute it together with others.
    pub fused: Option<CudaFunction>,
}

impl Call {
    /// A call with at most [`MAX_PARAMS`] arguments.
    pub fn new(
        kernel: &'static str,
        module: &'static str,
        grid: LaunchConfig,
        overlaps: bool,
        args: &[u64],
    ) -> Call {
        debug_assert!(args.len() <= MAX_PARAMS);
        let mut params = [0; MAX_PARAMS];
        params.iter_mut().zip(args).for_each(|(to, arg)| *to = *arg);
        Call {
            kernel,
            module,
            grid,
            overlaps,
            params,
            n_params: args.len(),
        }
    }

    /// The arguments of a call of `kernel` that has `N`, without the start.
    pub fn args<const N: usize>(&self, kernel: &str) -> Option<&[u64; N]> {
        let is_such = self.kernel == kernel && self.n_params == N + 1;
        self.params.first_chunk().filter(|_| is_such)
    }

    /// The address for the start; 0: none.
    pub fn start(&self) -> u64 {
        self.params[self.n_params - 1]
    }

    /// Changes the address for the start.
    pub fn set_start(&mut self, at: u64) {
        self.params[self.n_params - 1] = at;
    }

    /// Pointers to the arguments, for the driver, which reads as many as the kernel has. The null after them is for the driver of
    /// the tests, which does not know how many.
    pub fn pointers(&self) -> [*mut c_void; MAX_PARAMS + 1] {
        let mut pointers = [null_mut(); MAX_PARAMS + 1];
        for (pointer, bits) in pointers.iter_mut().zip(&self.params[..self.n_params]) {
            *pointer = from_ref(bits).cast_mut().cast();
        }
        pointers
    }

    /// The call of `function` as a node of a graph.
    pub fn node(
        &self,
        function: &CudaFunction,
        params: &mut [*mut c_void; MAX_PARAMS + 1],
    ) -> sys::CUDA_KERNEL_NODE_PARAMS {
        let (grid, block) = (self.grid.grid_dim, self.grid.block_dim);
        sys::CUDA_KERNEL_NODE_PARAMS {
            func: function.cu_function(),
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block.0,
            blockDimY: block.1,
            blockDimZ: block.2,
            sharedMemBytes: self.grid.shared_mem_bytes,
            kernelParams: params.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: null_mut(),
        }
    }

    /// Whether the arguments and the grid are the same.
    pub fn has_same_arguments(&self, other: &Call) -> bool {
        let (a, b) = (&self.grid, &other.grid);
        self.params == other.params
            && (a.grid_dim, a.block_dim, a.shared_mem_bytes)
                == (b.grid_dim, b.block_dim, b.shared_mem_bytes)
    }
}

impl Launch {
    /// Whether both launch the same kernel.
    fn has_same_kernel(&self, other: &Launch) -> bool {
        self.function.cu_function() == other.function.cu_function()
            && self.call.overlaps == other.call.overlaps
    }

    /// Starts the kernel on a stream whose context is current.
    fn start(&self, stream: &CudaStream) -> std::result::Result<(), DriverError> {
        let mut params = self.call.pointers();
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let (grid, block) = (self.call.grid.grid_dim, self.call.grid.block_dim);
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block.0,
            blockDimY: block.1,
            blockDimZ: block.2,
            sharedMemBytes: self.call.grid.shared_mem_bytes,
            hStream: stream.cu_stream(),
            attrs: &raw mut overlap,
            numAttrs: u32::from(self.call.overlaps),
        };
        // SAFETY: the function is loaded. The driver reads the parameters in the signature of the kernel. A test compares this
        // signature with the declaration, and `Module::launch` compares the declaration with the arguments. Each argument has
        // eight bytes. The attribute outlives the call.
        let launched = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                params.as_mut_ptr(),
                null_mut(),
            )
        };
        launched.result()
    }
}

/// The launches of a GPU. All its modules share them.
#[derive(Default)]
pub(super) struct Launches {
    /// Whether the next kernel must start after everything its stream was given.
    in_order: AtomicBool,
    /// Where the next kernel stores the time of its start; 0: nowhere.
    start: AtomicU64,
    pass: Mutex<Pass>,
}

impl Launches {
    /// The next kernel must start after everything its stream was given. Call it after a copy: the CUDA documentation does not
    /// state whether a kernel that may start early waits for a preceding copy.
    pub fn follow_copy(&self) {
        self.in_order.store(true, Ordering::Relaxed);
    }

    /// The next kernel stores the time of its start at `at`, a `u64` in ns on the clock of the GPU (`Start` in pipeline.cuh).
    pub fn store_start(&self, at: Ptr) {
        self.start.store(at.0, Ordering::Relaxed);
    }

    /// Whether the next kernel will store its start.
    pub fn stores_start(&self) -> bool {
        self.start.load(Ordering::Relaxed) != 0
    }

    /// Starts a pass of `n_tokens` tokens. If `repeats`, its launches on `stream` are collected. Nothing else may be started on
    /// `stream` without [`Launches::flush`].
    pub fn begin_pass(&self, stream: &Arc<CudaStream>, n_tokens: usize, repeats: bool) {
        let mut pass = self.lock();
        pass.flush();
        let collects = repeats && n_tokens <= MAX_TOKENS && !pass.is_unsupported;
        pass.stream = collects.then(|| stream.clone());
        pass.n_tokens = n_tokens;
        (pass.segment, pass.at) = (0, 0);
        pass.failure = None;
    }

    /// Launches a kernel on a stream whose context is current. `launch` gets the start and whether the kernel must start in order.
    ///
    /// # Errors
    /// The driver rejects the launch. The next launch then has the same start and order.
    pub fn launch(
        &self,
        stream: &CudaStream,
        launch: impl FnOnce(Ptr, bool) -> Launch,
    ) -> Result<()> {
        let in_order = self.in_order.swap(false, Ordering::Relaxed);
        let start = self.start.swap(0, Ordering::Relaxed);
        let launch = launch(Ptr(start), in_order);
        let kernel = launch.call.kernel;
        let mut pass = self.lock();
        let collects = pass
            .stream
            .as_ref()
            .is_some_and(|compute| compute.cu_stream() == stream.cu_stream());
        let started = if collects {
            pass.add(launch)
        } else {
            launch.start(stream)
        };
        started.map_err(|error| {
            self.in_order.fetch_or(in_order, Ordering::Relaxed);
            self.start.store(start, Ordering::Relaxed);
            failed(kernel, error)
        })
    }

    /// Starts the collected launches. Call it before anything but a launch is added to the stream.
    pub fn flush(&self) {
        self.lock().flush();
    }

    /// The error of a launch that was started late, once.
    ///
    /// # Errors
    /// That error. The results of the pass are lost.
    pub fn check(&self) -> Result<()> {
        match self.lock().failure.take() {
            Some((kernel, error)) => Err(failed(kernel, error)),
            None => Ok(()),
        }
    }

    /// Number of graphs started so far.
    pub fn n_graphs(&self) -> u64 {
        self.lock().n_graphs
    }

    fn lock(&self) -> MutexGuard<'_, Pass> {
        // A panic leaves the launches of a pass behind, which the next pass removes.
        self.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(kernel: &'static str, error: DriverError) -> Error {
    Error::Launch {
        kernel,
        status: DriverStatus(error),
    }
}

/// The launches of a pass, and those of earlier passes that it may repeat.
#[derive(Default)]
struct Pass {
    /// The compute stream, if the pass is collected.
    stream: Option<Arc<CudaStream>>,
    n_tokens: usize,
    /// By number of tokens: the launches of the last pass.
    before: HashMap<usize, Vec<Segment>>,
    /// Index of the current segment, and number of its launches in this pass.
    segment: usize,
    at: usize,
    /// Launches of the current segment that are not started: so far, they have the kernels of the last pass. Empty if they differ.
    pending: Vec<Launch>,
    /// The first launch that failed when it was started late.
    failure: Option<(&'static str, DriverError)>,
    /// Whether the driver cannot create graphs.
    is_unsupported: bool,
    n_graphs: u64,
}

/// Consecutive launches, with nothing else on the stream in between.
#[derive(Default)]
struct Segment {
    launches: Vec<Launch>,
    /// The same launches, if they were repeated.
    graph: Option<Graph>,
}

impl Pass {
    fn segments(&mut self) -> &mut Vec<Segment> {
        self.before.entry(self.n_tokens).or_default()
    }

    fn add(&mut self, launch: Launch) -> std::result::Result<(), DriverError> {
        let (index, at) = (self.segment, self.at);
        let n_pending = self.pending.len();
        let segments = self.segments();
        if segments.len() == index {
            segments.push(Segment::default());
        }
        let before = &mut segments[index];
        let repeats = n_pending == at
            && before.launches.len() >= MIN_GRAPH
            && before
                .launches
                .get(at)
                .is_some_and(|it| it.has_same_kernel(&launch));
        if repeats {
            self.pending.push(launch);
        } else {
            if n_pending == at {
                before.graph = None;
                before.launches.clear();
                self.start_pending();
            }
            if let Some(stream) = &self.stream {
                launch.start(stream)?;
            }
            self.segments()[index].launches.push(launch);
        }
        self.at += 1;
        let limit = FIRST_SEGMENTS.get(index).copied().unwrap_or(SEGMENT);
        if self.at == limit {
            self.flush();
        }
        Ok(())
    }

    /// Ends the current segment.
    fn flush(&mut self) {
        if self.at == 0 {
            return;
        }
        let index = self.segment;
        if !self.pending.is_empty() {
            let n_pending = self.pending.len();
            if self.segments()[index].launches.len() == n_pending {
                self.start_graph();
            } else {
                let segment = &mut self.segments()[index];
                segment.graph = None;
                segment.launches.clear();
                self.start_pending();
            }
        }
        (self.segment, self.at) = (index + 1, 0);
    }

    /// Starts the pending launches one by one, and moves them to the current segment.
    fn start_pending(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        if let Some(stream) = &self.stream {
            for launch in &pending {
                if let Err(error) = launch.start(stream) {
                    self.failure.get_or_insert((launch.call.kernel, error));
                }
            }
        }
        let index = self.segment;
        self.segments()[index].launches.extend(pending);
    }

    /// Starts the pending launches, which are as many as in the last pass, as a graph.
    fn start_graph(&mut self) {
        let Some(stream) = self.stream.clone() else {
            return;
        };
        let (index, n_tokens) = (self.segment, self.n_tokens);
        let pending = std::mem::take(&mut self.pending);
        let Some(segment) = self
            .before
            .get_mut(&n_tokens)
            .and_then(|all| all.get_mut(index))
        else {
            return;
        };
        let is_same = |(a, b): (&Launch, &Launch)| a.call.has_same_arguments(&b.call);
        let is_repeated = segment.launches.iter().zip(&pending).all(is_same);
        segment.launches = pending;
        let graph = match segment.graph.take() {
            Some(graph) if is_repeated => Ok(graph),
            Some(graph) => graph.updated(stream.context(), &segment.launches),
            None => Graph::new(stream.context(), &segment.launches),
        };
        let started = graph.and_then(|graph| {
            graph.start(&stream)?;
            Ok(graph)
        });
        match started {
            Ok(graph) => {
                segment.graph = Some(graph);
                self.n_graphs += 1;
            }
            Err(_) => {
                self.is_unsupported = true;
                self.pending = std::mem::take(&mut segment.launches);
                self.start_pending();
            }
        }
    }
}
