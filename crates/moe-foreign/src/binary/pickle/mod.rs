//! A reader for Python pickles that builds values and never executes code.
//!
//! A pickle is a program for a stack machine. Opcodes for plain values are executed. An opcode that would call a function only
//! records the call ([`Node::Call`]), and only the globals that PyTorch needs for tensors are accepted ([`Global`]). Any other
//! opcode or global is an error with its byte offset.
//!
//! Supports protocols 2 to 5. Format: [`Lib/pickletools.py`](https://github.com/python/cpython/blob/main/Lib/pickletools.py) of
//! CPython.

mod machine;
#[cfg(test)]
mod tests;

use super::array::ElementType;
use super::error::BinaryError;
use machine::Machine;

/// Maximum number of values in a pickle: about 300,000 forward passes of SGLang's recorder.
const MAX_VALUES: usize = 1 << 22;
/// Maximum size of a pickle in bytes, without the elements of its tensors.
pub(crate) const MAX_SIZE: usize = 64 << 20;

/// A value. `Node` is an index in the arena of the [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Node(u32),
}

/// A value in the arena. Nodes refer to other nodes by index, so deeply nested pickles need no recursion.
#[derive(Debug)]
pub(crate) enum Node<'a> {
    Text(&'a str),
    /// A byte string, whose content is not kept.
    Bytes,
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Global(Global),
    /// A persistent id: a storage of PyTorch.
    Persistent(Value),
    /// A recorded call: function and arguments.
    Call(Global, Value),
}

/// The globals (modules and names) that a pickle may refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Global {
    /// `torch._utils._rebuild_tensor`, `_v2` and `_v3`: a tensor with offset, shape and strides in a storage.
    RebuildTensor,
    /// `torch._utils._rebuild_parameter`, whose first argument is the tensor.
    RebuildParameter,
    /// A typed storage (`torch.IntStorage`) or an element type (`torch.uint16`).
    Elements(ElementType),
    /// A storage or an element type that is not supported. The rest of the file can still be read.
    OtherElements,
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `torch.Size`, a tuple.
    Size,
    /// `torch.device`.
    Device,
}

impl Global {
    fn find(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3") => {
                Self::RebuildTensor
            }
            ("torch._utils", "_rebuild_parameter") => Self::RebuildParameter,
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch", "Size") => Self::Size,
            ("torch", "device") => Self::Device,
            ("torch", "BoolStorage") => Self::Elements(ElementType::Bool),
            ("torch", "ByteStorage") => Self::Elements(ElementType::U8),
            ("torch", "CharStorage") => Self::Elements(ElementType::I8),
            ("torch", "ShortStorage") => Self::Elements(ElementType::I16),
            ("torch", "IntStorage") => Self::Elements(ElementType::I32),
            ("torch", "LongStorage") => Self::Elements(ElementType::I64),
            ("torch", "FloatStorage") => Self::Elements(ElementType::F32),
            ("torch", "DoubleStorage") => Self::Elements(ElementType::F64),
            ("torch", "uint16") => Self::Elements(ElementType::U16),
            ("torch", "uint32") => Self::Elements(ElementType::U32),
            ("torch", "uint64") => Self::Elements(ElementType::U64),
            ("torch.storage", "UntypedStorage") => Self::OtherElements,
            ("torch", "HalfStorage" | "BFloat16Storage" | "float16" | "bfloat16") => {
                Self::OtherElements
            }
            _ => return None,
        })
    }
}

/// A parsed pickle.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Value,
}

impl<'a> Pickle<'a> {
    /// Parses a pickle.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self, BinaryError> {
        if bytes.len() > MAX_SIZE {
            return Err(BinaryError::at(
                0,
                format!(
                    "the pickle has {} bytes; the maximum is {MAX_SIZE}; record fewer passes",
                    bytes.len()
                ),
            ));
        }
        Machine::new(bytes).run()
    }

    pub(crate) fn root(&self) -> Value {
        self.root
    }

    /// The node of a value; `None` for plain values.
    pub(crate) fn node(&self, value: Value) -> Option<&Node<'a>> {
        match value {
            Value::Node(node) => self.nodes.get(node as usize),
            _ => None,
        }
    }

    /// The entries of a dictionary.
    pub(crate) fn dict(&self, value: Value) -> Option<&[(Value, Value)]> {
        match self.node(value)? {
            Node::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    /// The elements of a list or a tuple.
    pub(crate) fn list(&self, value: Value) -> Option<&[Value]> {
        match self.node(value)? {
            Node::List(elements) | Node::Tuple(elements) => Some(elements),
            _ => None,
        }
    }

    pub(crate) fn text(&self, value: Value) -> Option<&'a str> {
        match self.node(value)? {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of a key in a dictionary. As in Python, the last of several equal keys counts.
    pub(crate) fn get(&self, dict: Value, key: &str) -> Option<Value> {
        let entries = self.dict(dict)?;
        let mut entries = entries.iter().rev();
        entries
            .find(|&&(found, _)| self.text(found) == Some(key))
            .map(|&(_, value)| value)
    }
}
