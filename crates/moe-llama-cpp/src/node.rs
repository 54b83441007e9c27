//! Nodes of a graph during its computation.

use std::ffi::CStr;

use llama_cpp_sys_2 as sys;

use crate::backend;

/// A buffer that llama.cpp has allocated.
pub(crate) struct Buffer {
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Name of the buffer type.
    pub name: String,
    /// Usage, a value of `ggml_backend_buffer_usage`.
    pub usage: u8,
}

/// A tensor of a graph: a result or a source.
#[derive(Clone, Copy)]
pub struct Node<'a>(&'a sys::ggml_tensor);

impl<'a> Node<'a> {
    /// Wraps a tensor; `None` for null.
    ///
    /// # Safety
    /// `raw` is null, or a ggml tensor that lives for `'a` like its sources and their memory.
    pub(crate) unsafe fn new(raw: *const sys::ggml_tensor) -> Option<Node<'a>> {
        // SAFETY: guaranteed by the caller.
        unsafe { raw.as_ref() }.map(Node)
    }

    /// The name, up to the first byte that is not UTF-8.
    pub fn name(&self) -> &'a str {
        // SAFETY: reads an array of `c_char` as bytes.
        let bytes: &'a [u8] =
            unsafe { std::slice::from_raw_parts(self.0.name.as_ptr().cast(), self.0.name.len()) };
        let name = CStr::from_bytes_until_nul(bytes).map_or(bytes, CStr::to_bytes);
        match std::str::from_utf8(name) {
            Ok(name) => name,
            Err(error) => std::str::from_utf8(&name[..error.valid_up_to()]).unwrap_or_default(),
        }
    }

    /// The operation, a number of llama.cpp.
    pub fn op(&self) -> sys::ggml_op {
        self.0.op
    }

    /// Elements in each dimension (`ne`).
    pub fn ne(&self) -> [usize; 4] {
        self.0.ne.map(|n| usize::try_from(n).unwrap_or(0))
    }

    /// Name of the element type.
    pub fn type_name(&self) -> &'static str {
        // SAFETY: the name of a type is a constant, or null.
        let name = unsafe { sys::ggml_type_name(self.0.type_) };
        if name.is_null() {
            return "";
        }
        // SAFETY: a NUL-terminated constant.
        unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default()
    }

    /// The buffer that contains its data.
    pub(crate) fn buffer(&self) -> Option<Buffer> {
        let buffer = self.storage().0.0.buffer;
        if buffer.is_null() {
            return None;
        }
        // SAFETY: the buffer of a tensor lives as long as the tensor; its name is a constant.
        unsafe {
            Some(Buffer {
                address: sys::ggml_backend_buffer_get_base(buffer) as u64,
                size_bytes: sys::ggml_backend_buffer_get_size(buffer) as u64,
                name: backend::text(sys::ggml_backend_buffer_name(buffer)),
                usage: sys::ggml_backend_buffer_get_usage(buffer) as u8,
            })
        }
    }

    /// Size of its data in bytes, including gaps of strides.
    pub fn size_bytes(&self) -> u64 {
        // SAFETY: reads only fields of the tensor.
        (unsafe { sys::ggml_nbytes(self.0) }) as u64
    }

    /// Address of its data.
    pub fn address(&self) -> u64 {
        self.0.data as u64
    }

    /// Whether it computes something: ggml marks it for computation, and it is not a view or `GGML_OP_NONE`.
    pub fn is_operation(&self) -> bool {
        const VIEWS: [sys::ggml_op; 5] = [
            sys::GGML_OP_NONE,
            sys::GGML_OP_VIEW,
            sys::GGML_OP_RESHAPE,
            sys::GGML_OP_PERMUTE,
            sys::GGML_OP_TRANSPOSE,
        ];
        self.0.flags & sys::GGML_TENSOR_FLAG_COMPUTE as i32 != 0 && !VIEWS.contains(&self.0.op)
    }

    /// Whether it is computed: an operation with a result that is not empty.
    pub fn is_computed(&self) -> bool {
        self.is_operation() && !self.0.ne.contains(&0)
    }

    /// Whether it is an expert operation, which has a record for each routed token.
    pub fn is_expert_operation(&self) -> bool {
        [sys::GGML_OP_MUL_MAT_ID, sys::GGML_OP_ADD_ID].contains(&self.0.op)
    }

    /// Source `i`.
    pub fn source(&self, i: usize) -> Option<Node<'a>> {
        // SAFETY: sources live as long as the node.
        self.0.src.get(i).and_then(|&raw| unsafe { Node::new(raw) })
    }

    /// All sources, in ggml's order.
    pub fn sources(&self) -> impl Iterator<Item = Node<'a>> {
        let node = *self;
        (0..self.0.src.len()).filter_map(move |i| node.source(i))
    }

    /// The tensor whose memory it uses (another tensor for a view) and the offset in it in bytes.
    pub fn storage(&self) -> (Node<'a>, u64) {
        // SAFETY: the source of a view lives as long as the view.
        match unsafe { Node::new(self.0.view_src) } {
            Some(viewed) => (viewed, self.0.view_offs as u64),
            None => (*self, 0),
        }
    }

    /// Whether its data is in a buffer of model weights, or is a matrix of a LoRA adapter, whose buffers llama.cpp does not mark.
    pub fn is_weight(&self) -> bool {
        let storage = self.storage().0;
        let buffer = storage.0.buffer;
        let name = storage.name();
        if name.ends_with(".lora_a") || name.ends_with(".lora_b") {
            return true;
        }
        // SAFETY: the buffer of a tensor lives as long as the tensor.
        !buffer.is_null()
            && unsafe { sys::ggml_backend_buffer_get_usage(buffer) }
                == sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
    }

    /// Its elements in order, first dimension fastest. `None` if it is not F32, or not in host memory.
    pub fn f32s(&self) -> Option<Vec<f32>> {
        self.elements(sys::GGML_TYPE_F32)
    }

    /// Like [`Node::f32s`], for I32.
    pub fn i32s(&self) -> Option<Vec<i32>> {
        self.elements(sys::GGML_TYPE_I32)
    }

    fn elements<T: Copy>(&self, ty: sys::ggml_type) -> Option<Vec<T>> {
        if self.0.type_ != ty || self.0.data.is_null() || !self.in_host_memory() {
            return None;
        }
        let (ne, nb) = (self.ne(), self.0.nb);
        let mut elements = Vec::with_capacity(ne.iter().product());
        for i3 in 0..ne[3] {
            for i2 in 0..ne[2] {
                for i1 in 0..ne[1] {
                    for i0 in 0..ne[0] {
                        let at = i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                        // SAFETY: `T` is the element type of the tensor, and the strides keep the address inside it.
                        let element = unsafe {
                            self.0
                                .data
                                .cast::<u8>()
                                .add(at)
                                .cast::<T>()
                                .read_unaligned()
                        };
                        elements.push(element);
                    }
                }
            }
        }
        Some(elements)
    }

    fn in_host_memory(&self) -> bool {
        let buffer = self.storage().0.0.buffer;
        // SAFETY: the buffer of a tensor lives as long as the tensor.
        !buffer.is_null() && unsafe { sys::ggml_backend_buffer_is_host(buffer) }
    }
}
