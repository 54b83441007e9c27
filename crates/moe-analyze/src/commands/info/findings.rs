//! Facts, notes and faults of an input, as text and as machine-readable values.

use std::io::{self, Write};

use serde_json::{Map, Value};

use crate::output::{Cell, Format, Table, human_bytes};

/// Facts, notes and faults of an input.
#[derive(Debug, Default)]
pub struct Findings {
    facts: Vec<Fact>,
    notes: Vec<String>,
    faults: Vec<String>,
}

#[derive(Debug)]
struct Fact {
    /// Label to print, such as `tensor types`, whose machine-readable key is `tensor_types`.
    name: String,
    shown: Cell<'static>,
    value: Value,
}

impl Findings {
    /// Adds a fact with the same value in text and JSON.
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

    /// Adds a size in bytes: rounded in text, exact as `<name>_bytes` in JSON and CSV.
    pub fn size(&mut self, name: &str, bytes: u64) {
        let key = format!("{name} bytes");
        self.push(&key, human_bytes(bytes).into(), bytes.into());
    }

    /// Adds a fact with several parts: text to print, and an array or object for JSON.
    pub fn parts(&mut self, name: &str, shown: impl Into<Cell<'static>>, value: Value) {
        self.push(name, shown.into(), value);
    }

    /// Adds a note, which is not a fault.
    pub fn note(&mut self, what: String) {
        self.notes.push(what);
    }

    /// Adds a fault.
    pub fn fault(&mut self, what: impl Into<String>) {
        self.faults.push(what.into());
    }

    pub fn is_sound(&self) -> bool {
        self.faults.is_empty()
    }

    /// Writes one JSON object, or one row per fact, note and fault.
    pub fn write(&self, out: &mut dyn Write, format: Format) -> io::Result<()> {
        match format {
            Format::Json => serde_json::to_writer_pretty(&mut *out, &self.object())?,
            Format::Jsonl => serde_json::to_writer(&mut *out, &self.object())?,
            Format::Table | Format::Md => return self.write_rows(out, format, Fact::text_row),
            Format::Csv => return self.write_rows(out, format, Fact::csv_row),
        }
        writeln!(out)
    }

    /// Returns the facts as text: name and value. Then the notes and the faults.
    pub fn into_text(self) -> (Vec<(String, String)>, Vec<String>) {
        let facts = self.facts.iter().map(Fact::text_row);
        let facts = facts.map(|row| (row.property.clone(), row.value.to_text().into_owned()));
        let facts = facts.collect();
        (facts, self.notes.into_iter().chain(self.faults).collect())
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

/// A row of the table.
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

    fn text_row(&self) -> Row {
        let name = self.name.strip_suffix(" bytes").unwrap_or(&self.name);
        Row::new(name, self.shown.clone())
    }

    /// Returns the key and the exact number; a fact with several parts is text in CSV, too.
    fn csv_row(&self) -> Row {
        let value = self.value.as_u64().map_or(self.shown.clone(), Cell::Int);
        Row::new(&self.key(), value)
    }
}
