//! The stack machine.

use std::collections::HashMap;

use super::super::fault::BinaryFault;
use super::{Global, MAX_VALUES, Node, Pickle, Value};

pub(super) struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the step that is followed begins.
    step: usize,
    nodes: Vec<Node<'a>>,
    stack: Vec<Value>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            step: 0,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
    }

    /// Follows the steps up to STOP.
    pub(super) fn run(mut self) -> Result<Pickle<'a>, BinaryFault> {
        loop {
            self.step = self.at;
            let [code] = *self.array()?;
            if code == b'.' {
                let root = self.pop()?;
                return Ok(Pickle {
                    nodes: self.nodes,
                    root,
                });
            }
            self.follow(code)?;
            if self.stack.len() > MAX_VALUES || self.nodes.len() > MAX_VALUES {
                return Err(self.too_many());
            }
        }
    }

    /// Follows one step; the names in the comments are those of `pickletools`.
    fn follow(&mut self, code: u8) -> Result<(), BinaryFault> {
        match code {
            0x80 => self.protocol(),                        // PROTO
            0x95 => self.take(8).map(|_| ()),               // FRAME: says how much comes
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
            0x85..=0x87 => self.tuple((code - 0x84).into()), // TUPLE1 to TUPLE3
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
            b'b' => self.pop().map(|_| ()),                 // BUILD: attributes of a dictionary say nothing here
            _ => Err(self.fault(format!(
                "step 0x{code:02x} of the pickle is not needed for tensors and is not followed; save tensors, lists, dictionaries, numbers and strings alone"
            ))),
        }
    }

    fn fault(&self, reason: impl Into<String>) -> BinaryFault {
        BinaryFault::at(self.step, reason)
    }

    fn damaged(&self) -> BinaryFault {
        damaged(self.step)
    }

    fn too_many(&self) -> BinaryFault {
        self.fault(format!(
            "the pickle holds more than {MAX_VALUES} values; record a shorter time"
        ))
    }

    // Bytes

    fn take(&mut self, n: usize) -> Result<&'a [u8], BinaryFault> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(taken) = rest.get(..n) else {
            return Err(self.fault("the pickle is cut off there; the file is damaged"));
        };
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], BinaryFault> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| self.damaged())
    }

    /// A little-endian number of `size` bytes, at most 8.
    fn unsigned(&mut self, size: usize) -> Result<u64, BinaryFault> {
        let bytes = self.take(size)?;
        let digits = bytes.iter().rev();
        Ok(digits.fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// Bytes after their number, which has `size` bytes itself.
    fn counted(&mut self, size: usize) -> Result<&'a [u8], BinaryFault> {
        let n = self.unsigned(size)?;
        let n = usize::try_from(n).map_err(|_| self.damaged())?;
        self.take(n)
    }

    fn line(&mut self) -> Result<&'a str, BinaryFault> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == b'\n');
        let line = self.take(end.map_or(rest.len() + 1, |end| end + 1))?;
        std::str::from_utf8(line.trim_ascii_end()).map_err(|_| self.damaged())
    }

    // The stack

    fn push(&mut self, value: Value) -> Result<(), BinaryFault> {
        self.stack.push(value);
        Ok(())
    }

    fn make(&mut self, node: Node<'a>) -> Result<(), BinaryFault> {
        let number = u32::try_from(self.nodes.len()).map_err(|_| self.too_many())?;
        self.nodes.push(node);
        self.push(Value::Node(number))
    }

    /// The topmost value; those below the last mark are not there to be taken.
    fn pop(&mut self) -> Result<Value, BinaryFault> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.damaged());
        }
        self.stack.pop().ok_or_else(|| self.damaged())
    }

    fn top(&self) -> Result<Value, BinaryFault> {
        self.stack.last().copied().ok_or_else(|| self.damaged())
    }

    fn mark(&mut self) -> Result<(), BinaryFault> {
        if self.marks.len() >= MAX_VALUES {
            return Err(self.too_many());
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// The values above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Value>, BinaryFault> {
        let mark = self.marks.pop().ok_or_else(|| self.damaged())?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn top_node(&mut self) -> Result<&mut Node<'a>, BinaryFault> {
        let step = self.step;
        let node = match self.stack.last() {
            Some(&Value::Node(node)) => self.nodes.get_mut(node as usize),
            _ => None,
        };
        node.ok_or_else(|| damaged(step))
    }

    fn pop_text(&mut self) -> Result<&'a str, BinaryFault> {
        match self.pop()? {
            Value::Node(node) => match self.nodes.get(node as usize) {
                Some(Node::Text(text)) => Ok(text),
                _ => Err(self.damaged()),
            },
            _ => Err(self.damaged()),
        }
    }

    // Steps

    fn protocol(&mut self) -> Result<(), BinaryFault> {
        match *self.array()? {
            [2..=5] => Ok(()),
            [protocol] => Err(self.fault(format!(
                "protocol {protocol} of pickle is not read; save with pickle_protocol=2, which is PyTorch's own choice"
            ))),
        }
    }

    fn int(&mut self, size: usize, is_signed: bool) -> Result<(), BinaryFault> {
        let number = self.unsigned(size)?;
        self.push(Value::Int(if is_signed {
            ((number & 0xFFFF_FFFF) as i32).into()
        } else {
            number as i64
        }))
    }

    /// A two's complement number of up to 255 bytes; what does not fit 64 bits is no number of ours.
    fn long(&mut self) -> Result<(), BinaryFault> {
        let bytes = self.counted(1)?;
        if bytes.len() > 8 {
            return Err(self.fault("an integer of more than 64 bits; the file is damaged"));
        }
        let is_negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if is_negative { 0xff } else { 0 }; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn float(&mut self) -> Result<(), BinaryFault> {
        let bytes = *self.array()?;
        self.push(Value::Float(f64::from_be_bytes(bytes)))
    }

    fn text(&mut self, size: usize) -> Result<(), BinaryFault> {
        let bytes = self.counted(size)?;
        let text = std::str::from_utf8(bytes);
        let text =
            text.map_err(|_| self.fault("a string that is not UTF-8; the file is damaged"))?;
        self.make(Node::Text(text))
    }

    fn byte_string(&mut self, size: usize) -> Result<(), BinaryFault> {
        self.counted(size)?;
        self.make(Node::Bytes)
    }

    fn append(&mut self) -> Result<(), BinaryFault> {
        let value = self.pop()?;
        self.extend(vec![value])
    }

    fn appends(&mut self) -> Result<(), BinaryFault> {
        let values = self.pop_mark()?;
        self.extend(values)
    }

    fn extend(&mut self, values: Vec<Value>) -> Result<(), BinaryFault> {
        let step = self.step;
        match self.top_node()? {
            Node::List(list) => list.extend(values),
            _ => return Err(damaged(step)),
        }
        Ok(())
    }

    fn tuple(&mut self, n: usize) -> Result<(), BinaryFault> {
        let mut elements = Vec::with_capacity(n);
        for _ in 0..n {
            elements.push(self.pop()?);
        }
        elements.reverse();
        self.make(Node::Tuple(elements))
    }

    fn marked_tuple(&mut self) -> Result<(), BinaryFault> {
        let elements = self.pop_mark()?;
        self.make(Node::Tuple(elements))
    }

    fn set_item(&mut self) -> Result<(), BinaryFault> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.insert(&[key, value])
    }

    fn set_items(&mut self) -> Result<(), BinaryFault> {
        let values = self.pop_mark()?;
        self.insert(&values)
    }

    /// Adds keys and values that follow one another.
    fn insert(&mut self, values: &[Value]) -> Result<(), BinaryFault> {
        let step = self.step;
        let (pairs, rest) = values.as_chunks::<2>();
        match self.top_node()? {
            Node::Dict(entries) if rest.is_empty() => {
                entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
            }
            _ => return Err(damaged(step)),
        }
        Ok(())
    }

    fn put(&mut self, size: usize) -> Result<(), BinaryFault> {
        let place = self.place(size)?;
        self.memoize(place)
    }

    fn memoize_next(&mut self) -> Result<(), BinaryFault> {
        let place = u32::try_from(self.memo.len()).map_err(|_| self.too_many())?;
        self.memoize(place)
    }

    /// A place in the memo, a number of at most four bytes.
    fn place(&mut self, size: usize) -> Result<u32, BinaryFault> {
        let place = self.unsigned(size)?;
        u32::try_from(place).map_err(|_| self.damaged())
    }

    fn memoize(&mut self, place: u32) -> Result<(), BinaryFault> {
        let value = self.top()?;
        self.memo.insert(place, value);
        if self.memo.len() > MAX_VALUES {
            return Err(self.too_many());
        }
        Ok(())
    }

    fn recall(&mut self, size: usize) -> Result<(), BinaryFault> {
        let place = self.place(size)?;
        let value = self.memo.get(&place).copied();
        self.push(value.ok_or_else(|| self.damaged())?)
    }

    fn global_lines(&mut self) -> Result<(), BinaryFault> {
        let module = self.line()?;
        let name = self.line()?;
        self.global(module, name)
    }

    fn stack_global(&mut self) -> Result<(), BinaryFault> {
        let name = self.pop_text()?;
        let module = self.pop_text()?;
        self.global(module, name)
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), BinaryFault> {
        let global = Global::find(module, name).ok_or_else(|| {
            let named = format!("{module}.{name}");
            let named: String = named.chars().take(120).collect();
            self.fault(format!(
                "the pickle names {named:?}, which is not needed for tensors: nothing of it is run; save tensors, lists, dictionaries, numbers and strings alone"
            ))
        })?;
        self.make(Node::Global(global))
    }

    fn persistent(&mut self) -> Result<(), BinaryFault> {
        let id = self.pop()?;
        self.make(Node::Persistent(id))
    }

    fn reduce(&mut self) -> Result<(), BinaryFault> {
        let arguments = self.pop()?;
        let global = match self.pop()? {
            Value::Node(node) => match self.nodes.get(node as usize) {
                Some(&Node::Global(global)) => global,
                _ => return Err(self.damaged()),
            },
            _ => return Err(self.damaged()),
        };
        self.make(match global {
            Global::OrderedDict => Node::Dict(Vec::new()), // its entries come as those of any dictionary
            other => Node::Call(other, arguments),
        })
    }
}

fn damaged(step: usize) -> BinaryFault {
    BinaryFault::at(step, "the pickle makes no sense there; the file is damaged")
}
