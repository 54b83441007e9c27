//! JSON texts in the format of Python's `json.dumps`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::python;

/// Maximum depth of lists and objects.
const MAX_DEPTH: usize = 200;

/// Arguments of `json.dumps`.
pub(super) struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    /// Text of one level of indentation; `None` for one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl Style {
    /// Reads the arguments of the filter.
    pub(super) fn new(kwargs: &Kwargs) -> Result<Style, Error> {
        let indent = match kwargs.get::<Option<Value>>("indent")? {
            Some(value) if value.is_none() => None,
            Some(value) => Some(match value.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(u8::try_from(value)?.into()),
            }),
            None => None,
        };
        let item_separator = if indent.is_some() { "," } else { ", " };
        let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
        let (item_separator, key_separator) = match separators {
            None => (item_separator.to_owned(), ": ".to_owned()),
            Some(texts) => <[String; 2]>::try_from(texts)
                .map(|[item, key]| (item, key))
                .map_err(|_| invalid("separators are not a pair of texts"))?,
        };
        Ok(Style {
            ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
            sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            indent,
            item_separator,
            key_separator,
        })
    }
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Returns the JSON text of a value. Uses steps of the template.
pub(super) fn text(state: &State, value: &Value, style: &Style) -> Result<String, Error> {
    let mut writer = Writer {
        state,
        style,
        text: String::new(),
        depth: 0,
    };
    writer.value(value)?;
    Ok(writer.text)
}

/// Uses a step of the template for each value in `value`. A list can contain another list twice, so that a template with few steps
/// can create a value with an exponential text.
pub(super) fn consume(state: &State, value: &Value) -> Result<(), Error> {
    fn visit(state: &State, value: &Value, depth: usize) -> Result<(), Error> {
        state.consume_fuel(1)?;
        if depth > MAX_DEPTH {
            return Err(invalid(format!("a value has more than {MAX_DEPTH} levels")));
        }
        match value.kind() {
            ValueKind::Seq => items(value).try_for_each(|item| visit(state, &item, depth + 1)),
            ValueKind::Map => items(value).try_for_each(|key| {
                let item = value.get_item(&key)?;
                visit(state, &item, depth + 1)
            }),
            ValueKind::String => state.consume_fuel(value.len().unwrap_or(0) as u64 / 64),
            _ => Ok(()),
        }
    }
    visit(state, value, 0)
}

/// Returns the approximate size in bytes of a value that comes from JSON.
pub(super) fn size(value: &Value) -> u64 {
    const PER_VALUE: u64 = 8;
    let inner = match value.kind() {
        ValueKind::String => value.len().unwrap_or(0) as u64,
        ValueKind::Seq => items(value).map(|item| size(&item)).sum(),
        ValueKind::Map => items(value)
            .map(|key| size(&key) + value.get_item(&key).map_or(0, |item| size(&item)))
            .sum(),
        _ => 0,
    };
    PER_VALUE + inner
}

/// The items of a list, or the keys of a map.
fn items(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

struct Writer<'a, 's> {
    state: &'a State<'s, 's>,
    style: &'a Style,
    text: String,
    depth: usize,
}

impl Writer<'_, '_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(bool_text(value)),
            ValueKind::Number => self.text += &number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container("[]", items.len(), |writer, i| writer.value(&items[i]))?;
            }
            ValueKind::Map => {
                let mut keys = Vec::new();
                for key in value.try_iter()? {
                    keys.push((key_text(&key)?, key));
                }
                if self.style.sort_keys {
                    keys.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.container("{}", keys.len(), |writer, i| {
                    let (text, key) = &keys[i];
                    writer.string(text)?;
                    writer.text += &writer.style.key_separator;
                    writer.value(&value.get_item(key)?)
                })?;
            }
            kind => return Err(invalid(format!("{kind} has no JSON representation"))),
        }
        Ok(())
    }

    /// Writes `n` items between the two characters of `brackets`.
    fn container(
        &mut self,
        brackets: &str,
        n: usize,
        item: impl Fn(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (open, close) = brackets.split_at(1);
        self.text += open;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(invalid(format!("a value has more than {MAX_DEPTH} levels")));
        }
        for i in 0..n {
            if i > 0 {
                self.text += &self.style.item_separator;
            }
            self.new_line()?;
            item(self, i)?;
        }
        self.depth -= 1;
        if n > 0 {
            self.new_line()?;
        }
        self.text += close;
        Ok(())
    }

    fn new_line(&mut self) -> Result<(), Error> {
        if let Some(indent) = &self.style.indent {
            let bytes = indent.len().saturating_mul(self.depth);
            self.state.consume_fuel(bytes as u64 / 64)?;
            self.text.push('\n');
            self.text += &indent.repeat(self.depth);
        }
        Ok(())
    }

    fn string(&mut self, string: &str) -> Result<(), Error> {
        self.state.consume_fuel(string.len() as u64 / 64)?;
        self.text.push('"');
        for c in string.chars() {
            match c {
                '"' => self.text += "\\\"",
                '\\' => self.text += "\\\\",
                '\n' => self.text += "\\n",
                '\r' => self.text += "\\r",
                '\t' => self.text += "\\t",
                '\u{8}' => self.text += "\\b",
                '\u{c}' => self.text += "\\f",
                c if c < ' ' || (self.style.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }
}

fn bool_text(value: &Value) -> &'static str {
    if value.is_true() { "true" } else { "false" }
}

fn number(value: &Value) -> String {
    match python::float(value) {
        Some(float) if float.is_nan() => "NaN".to_owned(),
        Some(f64::INFINITY) => "Infinity".to_owned(),
        Some(f64::NEG_INFINITY) => "-Infinity".to_owned(),
        Some(float) => python::float_text(float),
        None => value.to_string(),
    }
}

/// The text of a key; like in Python, numbers, booleans and None are keys, too.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Number => Ok(number(key)),
        ValueKind::Bool => Ok(bool_text(key).to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        kind => Err(invalid(format!("{kind} is not a key of a JSON object"))),
    }
}
