//! The embedded kernels: compressed PTX for three compute capabilities. At the first launch of a kernel, its PTX is decompressed
//! and compiled by the driver. Registers have differences instead of numbers in these files ([`with_numbers`]).

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUfunction_attribute::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig};
use cudarc::nvrtc::Ptx;
use moe_gguf::GgmlType;

use super::kernel::{Kernel, Kind};
use super::launch::fusion::fused_with;
use super::launches::{Call, Launch, Launches, MAX_PARAMS};
use super::{DriverStatus, Error, Ptr, Result};
use crate::kv_cache::CacheType;

/// From this capability on, a kernel may start while the previous one on its stream still runs (programmatic dependent launch).
/// Each kernel waits for the previous one after its independent work (`wait_for_previous` in pipeline.cuh).
const OVERLAP: u32 = 90;

/// Ten times the compute capabilities for which each source file is compiled, in ascending order.
const CAPABILITIES: [u32; 3] = [75, 80, OVERLAP];

/// A source file, and the compressed PTX of all source files of its family (`products_…`), each with a section for each of
/// [`CAPABILITIES`]. The sections are similar, so one compressed file takes less space than one for each source file.
pub(super) struct Embedded {
    name: &'static str,
    family: &'static [u8],
}

impl Embedded {
    const fn new(name: &'static str, family: &'static [u8]) -> Embedded {
        Embedded { name, family }
    }

    /// The PTX for one of [`CAPABILITIES`].
    fn section(&self, capability: u32) -> io::Result<String> {
        let text = decompress(self.family)?;
        let header = format!("{}, ", self.name);
        let mut modules = text.split("// module ");
        let module = modules.find(|module| module.starts_with(&header));
        let start = format!("\n// sm_{capability}\n");
        let section = module.and_then(|module| module.split_once(&start));
        let (_, section) = section.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("no section for {} and sm_{capability}", self.name),
            )
        })?;
        with_numbers(section.split("\n// sm_").next().unwrap_or(section))
    }

    /// The PTX for each of [`CAPABILITIES`], with a name for messages.
    #[cfg(test)]
    pub fn sections(&self) -> impl Iterator<Item = (String, String)> {
        CAPABILITIES.into_iter().map(|capability| {
            let name = format!("{} for sm_{capability}", self.name);
            (name, self.section(capability).unwrap())
        })
    }
}

static ATTENTION_PTX: &[u8] = include_bytes!("ptx/attention.ptx.zst");
static EXPERTS_PTX: &[u8] = include_bytes!("ptx/experts.ptx.zst");
static PRODUCTS_PTX: &[u8] = include_bytes!("ptx/products.ptx.zst");
static RECURRENT_PTX: &[u8] = include_bytes!("ptx/recurrent.ptx.zst");
static ROUTER_PTX: &[u8] = include_bytes!("ptx/router.ptx.zst");
static ROWS_PTX: &[u8] = include_bytes!("ptx/rows.ptx.zst");
static TOKEN_PTX: &[u8] = include_bytes!("ptx/token.ptx.zst");

pub(super) static ATTENTION: Embedded = Embedded::new("attention", ATTENTION_PTX);
pub(super) static ATTENTION_WIDE: Embedded = Embedded::new("attention_wide", ATTENTION_PTX);
pub(super) static ROUTER: Embedded = Embedded::new("router", ROUTER_PTX);
pub(super) static ROWS: Embedded = Embedded::new("rows", ROWS_PTX);
pub(super) static EXPERTS: Embedded = Embedded::new("experts", EXPERTS_PTX);
pub(super) static RECURRENT: Embedded = Embedded::new("recurrent", RECURRENT_PTX);

/// Attention by the type of keys and values; the last module is for any types.
pub(super) static ATTENTION_OF: [(Option<CacheType>, Embedded); 4] = [
    (
        Some(CacheType::F32),
        Embedded::new("attention_f32", ATTENTION_PTX),
    ),
    (
        Some(CacheType::F16),
        Embedded::new("attention_f16", ATTENTION_PTX),
    ),
    (
        Some(CacheType::Q8_0),
        Embedded::new("attention_q8_0", ATTENTION_PTX),
    ),
    (None, Embedded::new("attention_any", ATTENTION_PTX)),
];

/// Matrix products: a module for each type of weights.
pub(super) static PRODUCTS: [(GgmlType, Embedded); 16] = [
    (GgmlType::F32, Embedded::new("products_f32", PRODUCTS_PTX)),
    (GgmlType::F16, Embedded::new("products_f16", PRODUCTS_PTX)),
    (GgmlType::BF16, Embedded::new("products_bf16", PRODUCTS_PTX)),
    (GgmlType::Q4_0, Embedded::new("products_q4_0", PRODUCTS_PTX)),
    (GgmlType::Q4_1, Embedded::new("products_q4_1", PRODUCTS_PTX)),
    (GgmlType::Q5_0, Embedded::new("products_q5_0", PRODUCTS_PTX)),
    (GgmlType::Q5_1, Embedded::new("products_q5_1", PRODUCTS_PTX)),
    (GgmlType::Q8_0, Embedded::new("products_q8_0", PRODUCTS_PTX)),
    (GgmlType::Q2_K, Embedded::new("products_q2_k", PRODUCTS_PTX)),
    (GgmlType::Q3_K, Embedded::new("products_q3_k", PRODUCTS_PTX)),
    (GgmlType::Q4_K, Embedded::new("products_q4_k", PRODUCTS_PTX)),
    (GgmlType::Q5_K, Embedded::new("products_q5_k", PRODUCTS_PTX)),
    (GgmlType::Q6_K, Embedded::new("products_q6_k", PRODUCTS_PTX)),
    (
        GgmlType::IQ4_NL,
        Embedded::new("products_iq4_nl", PRODUCTS_PTX),
    ),
    (
        GgmlType::IQ4_XS,
        Embedded::new("products_iq4_xs", PRODUCTS_PTX),
    ),
    (
        GgmlType::MXFP4,
        Embedded::new("products_mxfp4", PRODUCTS_PTX),
    ),
];

/// Products of one token and fused kernels for its experts: a module for each type of weights.
pub(super) static TOKEN: [(GgmlType, Embedded); 10] = [
    (GgmlType::Q4_0, Embedded::new("token_q4_0", TOKEN_PTX)),
    (GgmlType::Q4_1, Embedded::new("token_q4_1", TOKEN_PTX)),
    (GgmlType::Q5_0, Embedded::new("token_q5_0", TOKEN_PTX)),
    (GgmlType::Q5_1, Embedded::new("token_q5_1", TOKEN_PTX)),
    (GgmlType::Q8_0, Embedded::new("token_q8_0", TOKEN_PTX)),
    (GgmlType::Q4_K, Embedded::new("token_q4_k", TOKEN_PTX)),
    (GgmlType::Q5_K, Embedded::new("token_q5_k", TOKEN_PTX)),
    (GgmlType::Q6_K, Embedded::new("token_q6_k", TOKEN_PTX)),
    (GgmlType::IQ4_NL, Embedded::new("token_iq4_nl", TOKEN_PTX)),
    (GgmlType::MXFP4, Embedded::new("token_mxfp4", TOKEN_PTX)),
];

/// Shared memory in bytes, static and dynamic, that a block may use without a function attribute.
const DEFAULT_SHARED: u32 = 48 << 10;

/// The kernels of one source file on one GPU.
pub(super) struct Module {
    embedded: &'static Embedded,
    /// The largest of [`CAPABILITIES`] that the GPU supports.
    capability: u32,
    launches: Arc<Launches>,
    context: Arc<CudaContext>,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    module: Option<Arc<CudaModule>>,
    functions: HashMap<&'static str, Function>,
}

#[derive(Clone)]
struct Function {
    function: CudaFunction,
    /// Limit of dynamic shared memory in bytes.
    shared: u32,
}

impl Module {
    /// A module on the GPU of `context`, not loaded yet. All modules of the GPU share `launches`.
    ///
    /// # Errors
    /// [`Error::Capability`], or a driver error.
    pub fn new(
        context: &Arc<CudaContext>,
        embedded: &'static Embedded,
        launches: &Arc<Launches>,
    ) -> Result<Module> {
        let device = capability(context)?;
        let fitting = CAPABILITIES.into_iter().rfind(|needed| *needed <= device);
        Ok(Module {
            embedded,
            capability: fitting.ok_or(Error::Capability { capability: device })?,
            launches: launches.clone(),
            context: context.clone(),
            loaded: Mutex::default(),
        })
    }

    /// Ten times the compute capability for which the kernels were compiled.
    pub fn capability(&self) -> u32 {
        self.capability
    }

    /// Launches `kernel` on `stream`. It may start early ([`OVERLAP`]). `args` must match its declaration, and the caller must
    /// ensure that pointers are valid. An empty grid is not launched.
    ///
    /// # Errors
    /// The module cannot be loaded, or the driver rejects the launch.
    pub fn launch(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        grid: LaunchConfig,
        args: &[Arg],
    ) -> Result<()> {
        self.start(stream, kernel, grid, args, self.capability >= OVERLAP)
    }

    /// As [`Module::launch`], but the kernel starts after everything the stream was given so far. Use it for kernels with
    /// long-running blocks: blocks that start early are distributed unevenly over the multiprocessors.
    ///
    /// # Errors
    /// As [`Module::launch`].
    pub fn launch_after(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        grid: LaunchConfig,
        args: &[Arg],
    ) -> Result<()> {
        self.start(stream, kernel, grid, args, false)
    }

    fn start(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        grid: LaunchConfig,
        args: &[Arg],
        early: bool,
    ) -> Result<()> {
        let (x, y, z) = grid.grid_dim;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        debug_assert_eq!(kernel.mismatch(args), None);
        let function = self.function(kernel.name, grid.shared_mem_bytes)?;
        let fused = fused_with(kernel.name);
        let fused = fused.map(|fused| self.function(fused.name, grid.shared_mem_bytes));
        let fused = fused.transpose()?;
        let bound = stream.context().bind_to_thread();
        bound.map_err(|error| Error::Launch {
            kernel: kernel.name,
            status: DriverStatus(error),
        })?;
        self.launches.launch(stream, |start, in_order| {
            let mut bits = [0; MAX_PARAMS];
            let given = args.iter().map(|arg| arg.bits).chain([start.0]);
            bits.iter_mut().zip(given).for_each(|(to, bits)| *to = bits);
            let (name, args) = (kernel.name, &bits[..=args.len()]);
            Launch {
                call: Call::new(name, self.embedded.name, grid, early && !in_order, args),
                function,
                fused,
            }
        })
    }

    /// The function of a kernel with a limit of at least `shared` bytes of dynamic shared memory.
    fn function(&self, kernel: &'static str, shared: u32) -> Result<CudaFunction> {
        // After a panic, the map is still consistent: each entry is inserted complete.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !loaded.functions.contains_key(kernel) {
            let function = self.load(&mut loaded, kernel)?;
            loaded.functions.insert(kernel, function);
        }
        let Some(found) = loaded.functions.get_mut(kernel) else {
            unreachable!("inserted above")
        };
        if shared > found.shared {
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = found.function.set_attribute(attribute, shared as i32);
            set.map_err(|error| Error::Launch {
                kernel,
                status: DriverStatus(error),
            })?;
            found.shared = shared;
        }
        Ok(found.function.clone())
    }

    fn load(&self, loaded: &mut Loaded, kernel: &'static str) -> Result<Function> {
        let module = match &loaded.module {
            Some(module) => module,
            None => {
                let ptx = self.embedded.section(self.capability);
                let ptx = ptx.map_err(|source| Error::Decompress {
                    module: self.embedded.name,
                    source,
                })?;
                let module = self.context.load_module(Ptx::from_src(ptx));
                loaded.module.insert(module.map_err(|error| Error::Load {
                    module: self.embedded.name,
                    status: DriverStatus(error),
                })?)
            }
        };
        let failed = |error| Error::Launch {
            kernel,
            status: DriverStatus(error),
        };
        let function = module.load_function(kernel).map_err(failed)?;
        let fixed = function.get_attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
        let fixed = fixed.map_err(failed)?.max(0) as u32;
        Ok(Function {
            function,
            shared: DEFAULT_SHARED.saturating_sub(fixed),
        })
    }
}

/// The text of a PTX file.
fn decompress(ptx: &[u8]) -> io::Result<String> {
    let text = zstd::decode_all(ptx)?;
    String::from_utf8(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Restores the numbers of registers and labels. In a PTX file, they are differences to the previous number of the same kind, such as
/// `%r+1`, `%f-20` or `$L__BB3_+1`, because the file then compresses better.
fn with_numbers(ptx: &str) -> io::Result<String> {
    let mut last: HashMap<&str, i64> = HashMap::new();
    let mut text = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(at) = rest.find(['%', '$']) {
        let is_register = rest[at..].starts_with('%');
        let is_in_kind = |c: char| {
            c.is_ascii_lowercase() || !is_register && (c.is_ascii_alphanumeric() || c == '_')
        };
        let end = rest[at + 1..].find(|c| !is_in_kind(c));
        let end = end.map_or(rest.len(), |n| at + 1 + n);
        let kind = &rest[at..end];
        text.push_str(&rest[..end]);
        rest = &rest[end..];
        let is_kind = is_register || kind.starts_with("$L__BB") && kind.ends_with('_');
        if !is_kind || !rest.starts_with(['+', '-']) {
            continue;
        }
        let digits = rest[1..].find(|c: char| !c.is_ascii_digit());
        let (difference, after) = rest.split_at(digits.map_or(rest.len(), |at| at + 1));
        let difference: i64 = difference
            .parse()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let number = last.entry(kind).or_default();
        *number += difference;
        text.push_str(&number.to_string());
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

/// Ten times the compute capability.
fn capability(context: &CudaContext) -> Result<u32> {
    let capability = context.compute_capability();
    let (major, minor) =
        capability.map_err(|error| Error::driver("reading the compute capability", error))?;
    Ok((major * 10 + minor) as u32)
}

/// A kernel argument of up to eight bytes. The driver reads as many bytes as the parameter has, the low ones first. So a `usize`
/// can be passed for `unsigned` and for `size_t`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arg {
    pub bits: u64,
    pub kind: Kind,
}

impl Arg {
    fn new(bits: impl Into<u64>, kind: Kind) -> Arg {
        Arg {
            bits: bits.into(),
            kind,
        }
    }
}

impl From<Ptr> for Arg {
    fn from(ptr: Ptr) -> Arg {
        Arg::new(ptr.0, Kind::Ptr)
    }
}

impl From<usize> for Arg {
    fn from(n: usize) -> Arg {
        Arg::new(n as u64, Kind::U64)
    }
}

impl From<u32> for Arg {
    fn from(n: u32) -> Arg {
        Arg::new(n, Kind::U32)
    }
}

impl From<f32> for Arg {
    fn from(x: f32) -> Arg {
        Arg::new(x.to_bits(), Kind::F32)
    }
}

impl From<bool> for Arg {
    fn from(yes: bool) -> Arg {
        Arg::new(yes, Kind::Bool)
    }
}

/// An array of [`Arg`] from values that convert to it.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { [$($crate::cuda::module::Arg::from($arg)),*] };
}
pub(super) use args;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restores_the_numbers_of_registers_and_labels() {
        let restored = |ptx| with_numbers(ptx).unwrap();
        assert_eq!(
            restored(
                ".reg .b32 %r<9>;\nmov.u32 %r+3, %tid.x;\nadd.s64 %rd+7, %rd-2, %rd+0;\nadd.s32 %r+1, %r-1, 5;\n\
                 ld.global.f32 %f+1, [%rd+2+16];\n@%p+1 bra $L__BB0_+2;\n$L__BB0_-1:\nbra $L__BB1_+7;"
            ),
            ".reg .b32 %r<9>;\nmov.u32 %r3, %tid.x;\nadd.s64 %rd7, %rd5, %rd5;\nadd.s32 %r4, %r3, 5;\n\
             ld.global.f32 %f1, [%rd7+16];\n@%p1 bra $L__BB0_2;\n$L__BB0_1:\nbra $L__BB1_7;"
        );
        assert_eq!(restored("ret; // 5 %"), "ret; // 5 %");
        assert!(with_numbers("mov.u32 %r+, 1;").is_err());
    }

    #[test]
    fn each_section_targets_its_capability() {
        let by_type = PRODUCTS.iter().chain(&TOKEN).map(|(_, embedded)| embedded);
        for embedded in [&ATTENTION, &ATTENTION_WIDE, &ROUTER, &ROWS, &EXPERTS]
            .into_iter()
            .chain(by_type)
            .chain([&RECURRENT])
        {
            for capability in CAPABILITIES {
                let text = embedded.section(capability).unwrap();
                let targets: Vec<&str> = text
                    .lines()
                    .filter_map(|line| line.strip_prefix(".target "))
                    .collect();
                assert_eq!(targets, [format!("sm_{capability}")], "{}", embedded.name);
            }
        }
    }

    #[test]
    fn rejects_truncated_ptx_and_missing_sections() {
        assert!(decompress(&ROWS_PTX[..ROWS_PTX.len() / 2]).is_err());
        assert_eq!(
            ROWS.section(60).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
