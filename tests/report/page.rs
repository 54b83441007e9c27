//! The file of a report: its JSON block and its tables, which are checked when it is read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek, Write};
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::{DataType, Float64Type, Int32Type, Int64Type};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::support::repository;

/// Columns of a table by name.
pub type Table = BTreeMap<String, Vec<f64>>;

/// A report: its page, its JSON block, and its tables by `INPUT-NAME`.
pub struct Page {
    pub html: String,
    pub json: Value,
    pub tables: BTreeMap<String, Table>,
}

impl Page {
    /// Reads a report, and validates its JSON block.
    pub fn read(path: &Path) -> Page {
        let html = fs::read_to_string(path).unwrap();
        let json = element(&html, "<script type=\"application/json\" id=\"report\">");
        let json: Value = serde_json::from_str(json).unwrap();
        validate(&json);
        let mut tables = BTreeMap::new();
        let start = "<script type=\"application/vnd.apache.parquet\" id=\"table-";
        for block in html.split(start).skip(1) {
            let (name, rest) = block.split_once("\">").unwrap();
            let (text, _) = rest.split_once("</script>").unwrap();
            tables.insert(name.to_owned(), table(&STANDARD.decode(text).unwrap()));
        }
        let page = Page { html, json, tables };
        (0..page.json["inputs"].as_array().unwrap().len()).for_each(|input| page.check(input));
        page
    }

    pub fn input(&self, input: usize) -> &Value {
        &self.json["inputs"][input]
    }

    pub fn column(&self, table: &str, column: &str) -> &[f64] {
        let columns = self.tables.get(table);
        let columns = columns.unwrap_or_else(|| panic!("no table {table}"));
        let column = columns.get(column);
        column.unwrap_or_else(|| panic!("no such column of {table}"))
    }

    pub fn chart(&self, id: &str) -> &Value {
        let mut charts = self.json["charts"].as_array().unwrap().iter();
        let chart = charts.find(|chart| chart["id"] == id);
        chart.unwrap_or_else(|| panic!("no chart {id}"))
    }

    pub fn has_chart(&self, id: &str) -> bool {
        let mut charts = self.json["charts"].as_array().unwrap().iter();
        charts.any(|chart| chart["id"] == id)
    }

    /// `(layer, expert)` → number of selections in the table `routing`.
    pub fn counts(&self, input: usize) -> BTreeMap<(u32, u32), u64> {
        let table = format!("{input}-routing");
        let layers = self.column(&table, "layer");
        let mut counts = BTreeMap::new();
        for k in 0..self.input(input)["top_k"].as_u64().unwrap() {
            let experts = self.column(&table, &format!("e{k}"));
            for (layer, expert) in layers.iter().zip(experts).filter(|(_, e)| **e >= 0.0) {
                *counts.entry((*layer as u32, *expert as u32)).or_default() += 1;
            }
        }
        counts
    }

    /// Checks the indices and the order of an input's tables.
    fn check(&self, input: usize) {
        let info = self.input(input);
        let len = |key: &str| info[key].as_array().unwrap().len() as f64;
        let n_tokens = info["tokens"]["text"].as_array().unwrap().len() as f64;
        for key in ["phase", "sequence", "position", "start"] {
            assert_eq!(info["tokens"][key].as_array().unwrap().len() as f64, n_tokens, "{key}");
        }
        let starts = info["tokens"]["start"].as_array().unwrap();
        assert!(starts.is_sorted_by_key(|start| start.as_i64()));
        let (records, routing) = (format!("{input}-records"), format!("{input}-routing"));
        if !self.tables.contains_key(&records) {
            return;
        }
        let n_rows = match self.tables.get(&routing) {
            Some(table) => table["token"].len() as f64,
            None => 0.0,
        };
        let is_below = |column: &str, limit: f64| {
            let mut values = self.column(&records, column).iter();
            assert!(values.all(|&value| (-1.0..limit).contains(&value)), "{column}");
        };
        for (column, limit) in [("token", n_tokens), ("op", len("ops")), ("name", len("names"))] {
            is_below(column, limit);
        }
        is_below("tensor", len("tensors"));
        is_below("route", n_rows);
        assert!(self.column(&records, "start").is_sorted());
        let layers: Vec<f64> = info["layers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|layer| layer["index"].as_f64().unwrap())
            .collect();
        let mut used = self.column(&records, "layer").iter();
        assert!(used.all(|layer| *layer == -1.0 || layers.contains(layer)));
        if n_rows == 0.0 {
            return;
        }
        assert!(self.column(&routing, "start").is_sorted());
        let places = ["token", "layer"];
        let of_records = places.map(|column| self.column(&records, column));
        let of_routing = places.map(|column| self.column(&routing, column));
        for (row, route) in self.column(&records, "route").iter().enumerate() {
            if *route >= 0.0 {
                let route = *route as usize;
                let record = of_records.map(|column| column[row]);
                assert_eq!(of_routing.map(|column| column[route]), record, "record {row}");
            }
        }
    }
}

/// The text of an element that starts with `start`.
fn element<'a>(html: &'a str, start: &str) -> &'a str {
    assert_eq!(html.matches(start).count(), 1, "{start}");
    let (_, rest) = html.split_once(start).unwrap();
    rest.split_once("</script>").unwrap().0
}

fn validate(json: &Value) {
    let schema = fs::read_to_string(repository("schemas/report.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let schema = jsonschema::validator_for(&schema).unwrap();
    let faults = schema.iter_errors(json);
    let faults: Vec<String> = faults
        .map(|fault| format!("{}: {fault}", fault.instance_path()))
        .collect();
    assert!(faults.is_empty(), "{faults:?}");
}

fn table(parquet: &[u8]) -> Table {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(parquet).unwrap();
    file.rewind().unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let mut table = Table::new();
    for batch in reader.build().unwrap() {
        let batch = batch.unwrap();
        let schema = batch.schema();
        for (field, array) in schema.fields().iter().zip(batch.columns()) {
            assert!(!field.is_nullable(), "{}", field.name());
            let values: Vec<f64> = match field.data_type() {
                DataType::Int32 => {
                    let values = array.as_primitive::<Int32Type>().values().iter();
                    values.map(|&value| value.into()).collect()
                }
                DataType::Int64 => {
                    let values = array.as_primitive::<Int64Type>().values().iter();
                    values.map(|&value| value as f64).collect()
                }
                DataType::Float64 => array.as_primitive::<Float64Type>().values().to_vec(),
                other => panic!("{}: {other}", field.name()),
            };
            table
                .entry(field.name().clone())
                .or_default()
                .extend(values);
        }
    }
    table
}
