//! What was learnt about a path: words for a person, values for a program.

use std::io::{self, Write};

use serde_json::{Map, Value};

use crate::output::{Cell, Format, Table, human_bytes};

/// Facts first, then what is wrong.
#[derive(Debug, Default)]
pub struct Findings {
    facts: Vec<Fact>,
    notes: Vec<String>,
    faults: Vec<String>,
}

#[derive(Debug)]
struct Fact {
    /// `tensor types`; the key of a program is `tensor_types`.
    name: String,
    shown: Cell<'static>,
    value: Value,
}

impl Findings {
    /// A fact that is told alike to a person and to a program.
    pub fn fact(&mut self, name: &str, value: impl Into<Cell<'static>>) {
        let shown = value.into();
        let value = match &shown {
            Cell::Null => Value::Null,
            Cell::Int(value) => (*value).into(),
            Cell::Float(value) | Cell::Fixed(value, _) => (*value).into(),
            Cell::Text(text) => text.clone().into_owned().into(),
            Cell::Json(value) => value.clone(),
        };
        self.push(name, shown, value);
    }

    /// A size: rounded for a person, exact under `<name>_bytes` for a program.
    pub fn size(&mut self, name: &str, bytes: u64) {
        let key = format!("{name} bytes");
        self.push(&key, human_bytes(bytes).into(), bytes.into());
    }

    /// A fact of several parts: a sentence for a person, an array or object for a program.
    pub fn parts(&mut self, name: &str, shown: impl Into<Cell<'static>>, value: Value) {
        self.push(name, shown.into(), value);
    }

    /// Something to know that is no fault.
    pub fn note(&mut self, what: String) {
        self.notes.push(what);
    }

    /// Something that is wrong.
    pub fn fault(&mut self, what: impl Into<String>) {
        self.faults.push(what.into());
    }

    pub fn is_sound(&self) -> bool {
        self.faults.is_empty()
    }

    /// One object in JSON, else a row for each fact, note and fault.
    pub fn write(&self, out: &mut dyn Write, format: Format) -> io::Result<()> {
        match format {
            Format::Json => serde_json::to_writer_pretty(&mut *out, &self.object())?,
            Format::Jsonl => serde_json::to_writer(&mut *out, &self.object())?,
            Format::Table | Format::Md => return self.write_rows(out, format, Fact::for_reading),
            Format::Csv => return self.write_rows(out, format, Fact::for_programs),
        }
        writeln!(out)
    }

    fn object(&self) -> Map<String, Value> {
        let facts = self.facts.iter();
        let mut object: Map<String, Value> =
            facts.map(|fact| (fact.key(), fact.value.clone())).collect();
        object.insert("sound".into(), self.is_sound().into());
        object.insert("notes".into(), self.notes.clone().into());
        object.insert("faults".into(), self.faults.clone().into());
        object
    }

    fn write_rows(
        &self,
        out: &mut dyn Write,
        format: Format,
        row: impl Fn(&Fact) -> Row + Clone,
    ) -> io::Result<()> {
        let text = |name: &'static str| move |what: &String| Row::new(name, what.clone());
        let rows = self.facts.iter().map(row);
        let rows = rows.chain(self.notes.iter().map(text("note")));
        let rows = rows.chain([Row::new(
            "sound",
            if self.is_sound() { "yes" } else { "no" },
        )]);
        let rows = rows.chain(self.faults.iter().map(text("fault")));
        Table::of(rows)
            .column("property", "property", |row| row.property.clone())
            .column("value", "value", |row| row.value.clone())
            .write(out, format)
    }

    fn push(&mut self, name: &str, shown: Cell<'static>, value: Value) {
        self.facts.push(Fact {
            name: name.to_owned(),
            shown,
            value,
        });
    }
}

/// A line of the table.
#[derive(Clone)]
struct Row {
    property: String,
    value: Cell<'static>,
}

impl Row {
    fn new(property: &str, value: impl Into<Cell<'static>>) -> Row {
        Row {
            property: property.to_owned(),
            value: value.into(),
        }
    }
}

impl Fact {
    fn key(&self) -> String {
        self.name.replace([' ', '-'], "_").to_lowercase()
    }

    fn for_reading(&self) -> Row {
        let name = self.name.strip_suffix(" bytes").unwrap_or(&self.name);
        Row::new(name, self.shown.clone())
    }

    /// Keys and exact numbers; what has parts is a sentence here too.
    fn for_programs(&self) -> Row {
        let value = self.value.as_u64().map_or(self.shown.clone(), Cell::Int);
        Row::new(&self.key(), value)
    }
}
