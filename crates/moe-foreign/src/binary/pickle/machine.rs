//! The stack machine that builds the values of a pickle.

use std::collections::HashMap;

use super::super::error::BinaryError;
use super::{Global, MAX_VALUES, Node, Pickle, Value};

pub(super) struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Offset of the current opcode.
    opcode_start: usize,
    nodes: Vec<Node<'a>>,
    stack: Vec<Value>,
    /// Stack heights at the marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            opcode_start: 0,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
    }

    /// Executes the opcodes up to STOP.
    pub(super) fn run(mut self) -> Result<Pickle<'a>, BinaryError> {
        loop {
            self.opcode_start = self.at;
            let [opcode] = *self.array()?;
            if opcode == b'.' {
                let root = self.pop()?;
                return Ok(Pickle {
                    nodes: self.nodes,
                    root,
                });
            }
            self.execute(opcode)?;
            if self.stack.len() > MAX_VALUES || self.nodes.len() > MAX_VALUES {
                return Err(self.too_many());
            }
        }
    }

    /// Executes one opcode. The comments are the names in `pickletools`.
    fn execute(&mut self, opcode: u8) -> Result<(), BinaryError> {
        match opcode {
            0x80 => self.protocol(),                        // PROTO
            0x95 => self.take(8).map(|_| ()),               // FRAME: length of the frame, ignored
            b'N' => self.push(Value::None),                 // NONE
            0x88 => self.push(Value::Bool(true)),           // NEWTRUE
            0x89 => self.push(Value::Bool(false)),          // NEWFALSE
            b'K' => self.int(1, false),                     // BININT1
            b'M' => self.int(2, false),                     // BININT2
            b'J' => self.int(4, true),                      // BININT
            0x8a => self.long(),                            // LONG1
            b'G' => self.float(),                           // BINFLOAT
            b'X' => self.text(4),                           // BINUNICODE
            0x8c => self.text(1),                           // SHORT_BINUNICODE
            0x8d => self.text(8),                           // BINUNICODE8
            b'C' => self.byte_string(1),                    // SHORT_BINBYTES
            b'B' => self.byte_string(4),                    // BINBYTES
            0x8e => self.byte_string(8),                    // BINBYTES8
            b'(' => self.mark(),                            // MARK
            b']' => self.make(Node::List(Vec::new())),      // EMPTY_LIST
            b'a' => self.append(),                          // APPEND
            b'e' => self.appends(),                         // APPENDS
            b')' => self.make(Node::Tuple(Vec::new())),     // EMPTY_TUPLE
            0x85..=0x87 => self.tuple((opcode - 0x84).into()), // TUPLE1 to TUPLE3
            b't' => self.marked_tuple(),                    // TUPLE
            b'}' => self.make(Node::Dict(Vec::new())),      // EMPTY_DICT
            b's' => self.set_item(),                        // SETITEM
            b'u' => self.set_items(),                       // SETITEMS
            b'q' => self.put(1),                            // BINPUT
            b'r' => self.put(4),                            // LONG_BINPUT
            0x94 => self.memoize_next(),                    // MEMOIZE
            b'h' => self.recall(1),                         // BINGET
            b'j' => self.recall(4),                         // LONG_BINGET
            b'0' => self.pop().map(|_| ()),                 // POP
            b'1' => self.pop_mark().map(|_| ()),            // POP_MARK
            b'c' => self.global_lines(),                    // GLOBAL
            0x93 => self.stack_global(),                    // STACK_GLOBAL
            b'Q' => self.persistent(),                      // BINPERSID
            b'R' => self.reduce(),                          // REDUCE
            b'b' => self.pop().map(|_| ()),                 // BUILD: attributes, ignored
            _ => Err(self.error(format!(
                "opcode 0x{opcode:02x} of the pickle is not supported; save only tensors, lists, dictionaries, numbers and strings"
            ))),
        }
    }

    fn error(&self, reason: impl Into<String>) -> BinaryError {
        BinaryError::at(self.opcode_start, reason)
    }

    fn damaged(&self) -> BinaryError {
        damaged(self.opcode_start)
    }

    fn too_many(&self) -> BinaryError {
        self.error(format!(
            "the pickle contains more than {MAX_VALUES} values; record fewer passes"
        ))
    }

    // Bytes

    fn take(&mut self, n: usize) -> Result<&'a [u8], BinaryError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(taken) = rest.get(..n) else {
            return Err(self.error("the pickle is truncated; the file is damaged"));
        };
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], BinaryError> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| self.damaged())
    }

    /// A little-endian number of `size` bytes, at most 8.
    fn unsigned(&mut self, size: usize) -> Result<u64, BinaryError> {
        let bytes = self.take(size)?;
        let digits = bytes.iter().rev();
        Ok(digits.fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// A byte string after its length, which has `size` bytes.
    fn length_prefixed(&mut self, size: usize) -> Result<&'a [u8], BinaryError> {
        let n = self.unsigned(size)?;
        let n = usize::try_from(n).map_err(|_| self.damaged())?;
        self.take(n)
    }

    fn line(&mut self) -> Result<&'a str, BinaryError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == b'\n');
        let line = self.take(end.map_or(rest.len() + 1, |end| end + 1))?;
        std::str::from_utf8(line.trim_ascii_end()).map_err(|_| self.damaged())
    }

    // The stack

    fn push(&mut self, value: Value) -> Result<(), BinaryError> {
        self.stack.push(value);
        Ok(())
    }

    fn make(&mut self, node: Node<'a>) -> Result<(), BinaryError> {
        let number = u32::try_from(self.nodes.len()).map_err(|_| self.too_many())?;
        self.nodes.push(node);
        self.push(Value::Node(number))
    }

    /// Removes the topmost value. Values below the last mark cannot be removed.
    fn pop(&mut self) -> Result<Value, BinaryError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.damaged());
        }
        self.stack.pop().ok_or_else(|| self.damaged())
    }

    fn top(&self) -> Result<Value, BinaryError> {
        self.stack.last().copied().ok_or_else(|| self.damaged())
    }

    fn mark(&mut self) -> Result<(), BinaryError> {
        if self.marks.len() >= MAX_VALUES {
            return Err(self.too_many());
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// The values above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Value>, BinaryError> {
        let mark = self.marks.pop().ok_or_else(|| self.damaged())?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn top_node(&mut self) -> Result<&mut Node<'a>, BinaryError> {
        let start = self.opcode_start;
        let node = match self.stack.last() {
            Some(&Value::Node(node)) => self.nodes.get_mut(node as usize),
            _ => None,
        };
        node.ok_or_else(|| damaged(start))
    }

    fn pop_text(&mut self) -> Result<&'a str, BinaryError> {
        match self.pop()? {
            Value::Node(node) => match self.nodes.get(node as usize) {
                Some(Node::Text(text)) => Ok(text),
                _ => Err(self.damaged()),
            },
            _ => Err(self.damaged()),
        }
    }

    // Opcodes

    fn protocol(&mut self) -> Result<(), BinaryError> {
        match *self.array()? {
            [2..=5] => Ok(()),
            [protocol] => Err(self.error(format!(
                "pickle protocol {protocol} is not supported (supported: 2 to 5); save with pickle_protocol=2, the default of PyTorch"
            ))),
        }
    }

    fn int(&mut self, size: usize, is_signed: bool) -> Result<(), BinaryError> {
        let number = self.unsigned(size)?;
        self.push(Value::Int(if is_signed {
            ((number & 0xFFFF_FFFF) as i32).into()
        } else {
            number as i64
        }))
    }

    /// A two's complement integer of up to 255 bytes; integers above 64 bits are rejected.
    fn long(&mut self) -> Result<(), BinaryError> {
        let bytes = self.length_prefixed(1)?;
        if bytes.len() > 8 {
            return Err(self.error("an integer has more than 64 bits; the file is damaged"));
        }
        let is_negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if is_negative { 0xff } else { 0 }; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn float(&mut self) -> Result<(), BinaryError> {
        let bytes = *self.array()?;
        self.push(Value::Float(f64::from_be_bytes(bytes)))
    }

    fn text(&mut self, size: usize) -> Result<(), BinaryError> {
        let bytes = self.length_prefixed(size)?;
        let text = std::str::from_utf8(bytes);
        let text = text.map_err(|_| self.error("a string is not UTF-8; the file is damaged"))?;
        self.make(Node::Text(text))
    }

    fn byte_string(&mut self, size: usize) -> Result<(), BinaryError> {
        self.length_prefixed(size)?;
        self.make(Node::Bytes)
    }

    fn append(&mut self) -> Result<(), BinaryError> {
        let value = self.pop()?;
        self.extend(vec![value])
    }

    fn appends(&mut self) -> Result<(), BinaryError> {
        let values = self.pop_mark()?;
        self.extend(values)
    }

    fn extend(&mut self, values: Vec<Value>) -> Result<(), BinaryError> {
        let start = self.opcode_start;
        match self.top_node()? {
            Node::List(list) => list.extend(values),
            _ => return Err(damaged(start)),
        }
        Ok(())
    }

    fn tuple(&mut self, n: usize) -> Result<(), BinaryError> {
        let mut elements = Vec::with_capacity(n);
        for _ in 0..n {
            elements.push(self.pop()?);
        }
        elements.reverse();
        self.make(Node::Tuple(elements))
    }

    fn marked_tuple(&mut self) -> Result<(), BinaryError> {
        let elements = self.pop_mark()?;
        self.make(Node::Tuple(elements))
    }

    fn set_item(&mut self) -> Result<(), BinaryError> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.insert(&[key, value])
    }

    fn set_items(&mut self) -> Result<(), BinaryError> {
        let values = self.pop_mark()?;
        self.insert(&values)
    }

    /// Adds alternating keys and values to the dictionary on top of the stack.
    fn insert(&mut self, values: &[Value]) -> Result<(), BinaryError> {
        let start = self.opcode_start;
        let (pairs, rest) = values.as_chunks::<2>();
        match self.top_node()? {
            Node::Dict(entries) if rest.is_empty() => {
                entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
            }
            _ => return Err(damaged(start)),
        }
        Ok(())
    }

    fn put(&mut self, size: usize) -> Result<(), BinaryError> {
        let place = self.place(size)?;
        self.memoize(place)
    }

    fn memoize_next(&mut self) -> Result<(), BinaryError> {
        let place = u32::try_from(self.memo.len()).map_err(|_| self.too_many())?;
        self.memoize(place)
    }

    /// An index in the memo, of `size` bytes.
    fn place(&mut self, size: usize) -> Result<u32, BinaryError> {
        let place = self.unsigned(size)?;
        u32::try_from(place).map_err(|_| self.damaged())
    }

    fn memoize(&mut self, place: u32) -> Result<(), BinaryError> {
        let value = self.top()?;
        self.memo.insert(place, value);
        if self.memo.len() > MAX_VALUES {
            return Err(self.too_many());
        }
        Ok(())
    }

    fn recall(&mut self, size: usize) -> Result<(), BinaryError> {
        let place = self.place(size)?;
        let value = self.memo.get(&place).copied();
        self.push(value.ok_or_else(|| self.damaged())?)
    }

    fn global_lines(&mut self) -> Result<(), BinaryError> {
        let module = self.line()?;
        let name = self.line()?;
        self.global(module, name)
    }

    fn stack_global(&mut self) -> Result<(), BinaryError> {
        let name = self.pop_text()?;
        let module = self.pop_text()?;
        self.global(module, name)
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), BinaryError> {
        let global = Global::find(module, name).ok_or_else(|| {
            let global = format!("{module}.{name}");
            let global: String = global.chars().take(120).collect();
            self.error(format!(
                "the pickle refers to {global:?}, which is not supported (code in pickles is never executed); save only tensors, lists, dictionaries, numbers and strings"
            ))
        })?;
        self.make(Node::Global(global))
    }

    fn persistent(&mut self) -> Result<(), BinaryError> {
        let id = self.pop()?;
        self.make(Node::Persistent(id))
    }

    fn reduce(&mut self) -> Result<(), BinaryError> {
        let arguments = self.pop()?;
        let global = match self.pop()? {
            Value::Node(node) => match self.nodes.get(node as usize) {
                Some(&Node::Global(global)) => global,
                _ => return Err(self.damaged()),
            },
            _ => return Err(self.damaged()),
        };
        self.make(match global {
            Global::OrderedDict => Node::Dict(Vec::new()), // SETITEMS adds its entries
            other => Node::Call(other, arguments),
        })
    }
}

fn damaged(offset: usize) -> BinaryError {
    BinaryError::at(
        offset,
        "the opcode does not match the stack of the pickle; the file is damaged",
    )
}
