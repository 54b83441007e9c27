//! Python's pickles, without Python: a reader that builds values and runs nothing.
//!
//! A pickle is a program for a stack machine. The steps that make plain values are followed; a step that would call something
//! is only written down ([`Node::Call`]), and it may name nothing but what PyTorch needs for tensors ([`Global`]). Everything
//! else is an error that names the step and its byte. Protocols 2 to 5, as documented in CPython's `Lib/pickletools.py`.

mod machine;
#[cfg(test)]
mod tests;

use super::array::ElementType;
use super::fault::BinaryFault;
use machine::Machine;

/// Values in a pickle, at most: some 300,000 forward passes of a recorder.
const MAX_VALUES: usize = 1 << 22;
/// Bytes of a pickle, at most. Tensors are not in it.
pub(crate) const MAX_SIZE: usize = 64 << 20;

/// A value; those with parts are in the arena of their [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Node(u32),
}

/// A value with parts. Parts refer to other nodes by number, so nothing here nests, however deep the pickle does.
#[derive(Debug)]
pub(crate) enum Node<'a> {
    Text(&'a str),
    /// A byte string; nothing here asks for one.
    Bytes,
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Global(Global),
    /// What a persistent id stands for: a storage of PyTorch.
    Persistent(Value),
    /// A call that was not made.
    Call(Global, Value),
}

/// The names that a pickle may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Global {
    /// `torch._utils._rebuild_tensor`, `_v2` and `_v3`: offset, size and strides of a tensor in a storage.
    RebuildTensor,
    /// `torch._utils._rebuild_parameter`: the tensor is its first argument.
    RebuildParameter,
    /// A typed storage, `torch.IntStorage`, or the type of elements, `torch.uint16`.
    Elements(ElementType),
    /// A storage, or a type of elements, that is not read; the rest of the file may be of use.
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

/// What a pickle holds.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Value,
}

impl<'a> Pickle<'a> {
    /// Reads a pickle.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self, BinaryFault> {
        if bytes.len() > MAX_SIZE {
            return Err(BinaryFault::at(
                0,
                format!(
                    "the pickle has {} bytes, {MAX_SIZE} are read at most; record a shorter time",
                    bytes.len()
                ),
            ));
        }
        Machine::new(bytes).run()
    }

    pub(crate) fn root(&self) -> Value {
        self.root
    }

    /// The parts of a value; `None` for those without.
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

    /// The value of a key in a dictionary; of a key that is there twice, the last, as in Python.
    pub(crate) fn get(&self, dict: Value, key: &str) -> Option<Value> {
        let entries = self.dict(dict)?;
        let mut entries = entries.iter().rev();
        entries
            .find(|&&(found, _)| self.text(found) == Some(key))
            .map(|&(_, value)| value)
    }
}
