//! A report: the tables of its inputs within a size limit, and the HTML file.

use std::io::{self, Read, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::read::GzDecoder;

use crate::charts::comparison;
use crate::document::{Document, SCHEMA};
use crate::error::Error;
use crate::input::InputReport;
use crate::records::Records;
use crate::routing::Routing;
use crate::spans::Spans;
use crate::table;

/// Maximum size of a report in bytes. Above it, tables are shortened.
pub const MAX_BYTES: usize = 30_000_000;

/// The page, with markers for the title, the JSON block and the tables. Compressed with gzip, for which Node has a function.
static COMPRESSED_TEMPLATE: &[u8] = include_bytes!("../web/dist/report.html.gz");
const TITLE: &str = "<!--report:title-->";
const JSON: &str = "<!--report:json-->";
const TABLES: &str = "<!--report:tables-->";

/// Bytes that are encoded as base64 at a time: a multiple of 3, so that only the last part has padding.
const BASE64_PART: usize = 3 << 14;

/// A report of one or two inputs.
#[derive(Debug)]
pub struct Report {
    document: Document,
    blocks: Vec<Block>,
}

/// A table as Parquet.
#[derive(Debug)]
struct Block {
    id: String,
    parquet: Vec<u8>,
}

/// The tables of an input.
struct Tables {
    records: Records,
    routing: Routing,
    spans: Spans,
}

/// What the tables of a report contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Contents {
    weights: bool,
    spans: bool,
    /// Maximum number of records of an input.
    records: usize,
}

impl Report {
    /// A report of one or two inputs. Its tables are shortened until it has at most [`MAX_BYTES`], and notes report what is missing.
    ///
    /// # Errors
    /// A table cannot be encoded.
    pub fn new(title: String, program: String, inputs: Vec<InputReport>) -> Result<Report, Error> {
        let mut charts = Vec::new();
        let (mut infos, mut tables) = (Vec::new(), Vec::new());
        for input in inputs {
            charts.extend(input.charts);
            infos.push(input.info);
            tables.push(Tables {
                records: input.records,
                routing: input.routing,
                spans: input.spans,
            });
        }
        let names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
        let compared = [("coverage", "all tokens, in-sample"), ("cache", "lru")];
        let compared = compared.map(|(id, series)| comparison(&charts, &names, id, series));
        charts.extend(compared.into_iter().flatten());
        let mut document = Document {
            schema: SCHEMA,
            title,
            program,
            inputs: infos,
            charts,
            notes: Vec::new(),
        };
        let json = serde_json::to_vec(&document)?.len();
        let available = MAX_BYTES.saturating_sub(json + template()?.len() + (1 << 16));
        let (blocks, contents) = fit(&tables, available)?;
        document.notes = notes(&tables, contents);
        Ok(Report { document, blocks })
    }

    /// Notes about the report, for example about omitted data.
    pub fn notes(&self) -> &[String] {
        &self.document.notes
    }

    /// Writes the HTML file.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn write(&self, out: &mut dyn Write) -> Result<(), Error> {
        let page = template()?;
        let (start, rest) = split(&page, TITLE)?;
        let (before_json, rest) = split(rest, JSON)?;
        let (before_tables, end) = split(rest, TABLES)?;
        out.write_all(start.as_bytes())?;
        out.write_all(escaped(&self.document.title).as_bytes())?;
        out.write_all(before_json.as_bytes())?;
        serde_json::to_writer(WithoutTags(&mut *out), &self.document)?;
        out.write_all(before_tables.as_bytes())?;
        for (i, block) in self.blocks.iter().enumerate() {
            let line_end = if i == 0 { "" } else { "\n" };
            write!(
                out,
                "{line_end}<script type=\"application/vnd.apache.parquet\" id=\"{}\">",
                block.id
            )?;
            for part in block.parquet.chunks(BASE64_PART) {
                out.write_all(STANDARD.encode(part).as_bytes())?;
            }
            out.write_all(b"</script>")?;
        }
        out.write_all(end.as_bytes())?;
        Ok(())
    }
}

/// The page with its markers.
fn template() -> io::Result<String> {
    let mut page = String::new();
    GzDecoder::new(COMPRESSED_TEMPLATE).read_to_string(&mut page)?;
    Ok(page)
}

/// Parts of the page before and after a marker.
fn split<'t>(page: &'t str, marker: &'static str) -> Result<(&'t str, &'t str), Error> {
    page.split_once(marker).ok_or(Error::Template { marker })
}

/// Text as HTML.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

/// Writes JSON without `<`, which ends a script element in some places. It occurs only in strings.
struct WithoutTags<'a>(&'a mut dyn Write);

impl Write for WithoutTags<'_> {
    fn write(&mut self, json: &[u8]) -> io::Result<usize> {
        for (i, part) in json.split(|&byte| byte == b'<').enumerate() {
            if i > 0 {
                self.0.write_all(b"\\u003c")?;
            }
            self.0.write_all(part)?;
        }
        Ok(json.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Encodes the tables in at most `available` bytes of base64. Omits first the router weights, then the spans, then records at the end.
fn fit(tables: &[Tables], available: usize) -> Result<(Vec<Block>, Contents), Error> {
    let most = tables.iter().map(|tables| tables.records.len()).max();
    let mut contents = Contents {
        weights: true,
        spans: true,
        records: most.unwrap_or(0),
    };
    loop {
        let blocks = encode(tables, contents)?;
        let size: usize = blocks.iter().map(Block::size).sum();
        if size <= available {
            return Ok((blocks, contents));
        }
        let has_weights = tables.iter().any(|tables| tables.routing.has_weights());
        let has_spans = tables.iter().any(|tables| tables.spans.len() > 0);
        if contents.weights && has_weights {
            contents.weights = false;
        } else if contents.spans && has_spans {
            contents.spans = false;
        } else {
            // The size is nearly proportional to the number of records.
            let records = contents.records as u128 * available as u128 / size.max(1) as u128;
            let records = usize::try_from(records * 19 / 20).unwrap_or(contents.records);
            if records >= contents.records || contents.records == 0 {
                return Ok((blocks, contents));
            }
            contents.records = records;
        }
    }
}

/// Encodes the tables of all inputs. Empty tables are omitted.
fn encode(tables: &[Tables], contents: Contents) -> Result<Vec<Block>, Error> {
    let mut blocks = Vec::new();
    for (input, tables) in tables.iter().enumerate() {
        let n_records = contents.records.min(tables.records.len());
        let (mut n_routing, mut n_spans) = (tables.routing.len(), tables.spans.len());
        if n_records < tables.records.len() {
            let last = n_records.checked_sub(1);
            let end = last.and_then(|last| tables.records.start.get(last).copied());
            let end = end.unwrap_or(-1);
            n_routing = tables
                .routing
                .starts()
                .partition_point(|&start| start <= end);
            n_spans = tables.spans.n_until(end);
        }
        let mut add = |name: &str, n: usize, columns: &dyn Fn() -> Vec<table::Column>| {
            if n > 0 {
                blocks.push(Block {
                    id: format!("table-{input}-{name}"),
                    parquet: table::encode(&columns())?,
                });
            }
            Ok::<(), Error>(())
        };
        add("records", n_records, &|| tables.records.columns(n_records))?;
        add("routing", n_routing, &|| {
            tables.routing.columns(n_routing, contents.weights)
        })?;
        if contents.spans {
            add("spans", n_spans, &|| tables.spans.columns(n_spans))?;
        }
    }
    Ok(blocks)
}

impl Block {
    /// Size in the page.
    fn size(&self) -> usize {
        self.parquet.len().div_ceil(3) * 4 + self.id.len() + 80
    }
}

/// Notes about data that the tables do not contain.
fn notes(tables: &[Tables], contents: Contents) -> Vec<String> {
    let limit = MAX_BYTES / 1_000_000;
    let because = format!("because the report would be larger than {limit} MB");
    let mut notes = Vec::new();
    if !contents.weights {
        notes.push(format!("Router weights are omitted, {because}."));
    }
    if !contents.spans {
        notes.push(format!("The timeline of transfers is omitted, {because}."));
    }
    for (number, tables) in (1..).zip(tables) {
        let all = tables.records.len();
        if contents.records < all {
            let n = contents.records;
            notes.push(format!(
                "Input {number}: the tables contain the first {n} of {all} records, {because}."
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::Selected;

    fn tables(n: usize) -> Tables {
        let mut routing = Routing::default();
        for row in 0..n {
            let token = i32::try_from(row).unwrap();
            routing.begin_row(token, 0, i64::from(token));
            for k in 0..4u32 {
                let expert = (u32::try_from(row).unwrap() * 7919 + k * 31) % 128;
                routing.push(Selected::new(
                    expert,
                    Some(f32::from(u8::try_from(expert).unwrap()) / 128.0),
                    None,
                ));
            }
        }
        Tables {
            records: Records::of_routing(&routing, |_, _| None),
            routing,
            spans: Spans::default(),
        }
    }

    #[test]
    fn template_has_each_marker_once() {
        let page = template().unwrap();
        for marker in [TITLE, JSON, TABLES] {
            assert_eq!(page.matches(marker).count(), 1, "{marker}");
        }
    }

    #[test]
    fn text_cannot_end_the_script() {
        let mut json = Vec::new();
        serde_json::to_writer(WithoutTags(&mut json), &["</script>", "a<b"]).unwrap();
        assert_eq!(json, br#"["\u003c/script>","a\u003cb"]"#);
        assert_eq!(escaped("a<b> & c"), "a&lt;b&gt; &amp; c");
    }

    #[test]
    fn omits_weights_then_records_to_fit() {
        let tables = [tables(20_000)];
        let (all, contents) = fit(&tables, usize::MAX).unwrap();
        assert_eq!((all.len(), contents.records), (2, 20_000));
        assert!(notes(&tables, contents).is_empty());
        let size: usize = all.iter().map(Block::size).sum();
        let (_, contents) = fit(&tables, size - 1).unwrap();
        assert_eq!((contents.weights, contents.records), (false, 20_000));
        let (few, contents) = fit(&tables, size / 4).unwrap();
        assert!(
            contents.records < 10_000 && contents.records > 100,
            "{contents:?}"
        );
        assert!(few.iter().map(Block::size).sum::<usize>() <= size / 4);
        assert_eq!(notes(&tables, contents).len(), 2);
    }
}
