//! A report: the tables of its inputs within a size limit, and the HTML file.

use std::io::{self, Read, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::read::GzDecoder;
use serde::Serialize;

use crate::charts::comparison;
use crate::document::{Document, SCHEMA, Tokens};
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
/// Start of the content security policy of the page.
const POLICY: &str = "default-src 'none'";
/// Value of `schema` in the JSON block of the live page.
const LIVE_SCHEMA: &str = "moe-analyze.live.v1";
const TABLES: &str = "<!--report:tables-->";

/// Bytes that are encoded as base64 at a time: a multiple of 3, so that only the last part has padding.
const BASE64_PART: usize = 3 << 14;

/// A report of one or two inputs.
#[derive(Debug)]
pub struct Report {
    document: Document,
    blocks: Vec<Block>,
    /// Number of records in the tables.
    n_records: usize,
    /// The page with its markers.
    page: String,
}

/// A table as Parquet.
#[derive(Debug)]
struct Block {
    id: String,
    parquet: Vec<u8>,
}

/// The tables of an input, and the tokens that they refer to.
struct Tables {
    records: Records,
    routing: Routing,
    spans: Spans,
    tokens: Tokens,
}

/// Numbers of the first rows of an input's tables.
struct Rows {
    records: usize,
    routing: usize,
    spans: usize,
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
    /// A report of one or two inputs. Its tables and their tokens are shortened until it has at most [`MAX_BYTES`], and notes report what
    /// is missing.
    ///
    /// # Errors
    /// A table cannot be encoded.
    pub fn new(title: String, program: String, inputs: Vec<InputReport>) -> Result<Report, Error> {
        let mut charts = Vec::new();
        let (mut infos, mut tables) = (Vec::new(), Vec::new());
        for mut input in inputs {
            charts.extend(input.charts);
            tables.push(Tables {
                records: input.records,
                routing: input.routing,
                spans: input.spans,
                tokens: std::mem::take(&mut input.info.tokens),
            });
            infos.push(input.info);
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
        let page = template()?;
        let available = MAX_BYTES.saturating_sub(json_size(&document)? + page.len() + (1 << 16));
        let (blocks, contents) = fit(&tables, available)?;
        document.notes = notes(&tables, contents);
        let mut n_records = 0;
        for (info, mut tables) in document.inputs.iter_mut().zip(tables) {
            let rows = tables.rows(contents);
            n_records += rows.records;
            let n_tokens = tables.n_tokens(&rows);
            tables.tokens.truncate(n_tokens);
            info.tokens = tables.tokens;
        }
        Ok(Report {
            document,
            blocks,
            n_records,
            page,
        })
    }

    /// Number of records in the tables of all inputs.
    pub fn n_records(&self) -> usize {
        self.n_records
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
        let (start, rest) = split(&self.page, TITLE)?;
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

/// The page as the live view of a server: it polls `ui/state` of the server that it was loaded from.
///
/// # Errors
/// The embedded page is damaged.
pub fn live_page(title: &str) -> Result<String, Error> {
    let page = template()?;
    let (start, rest) = split(&page, POLICY)?;
    let (before_title, rest) = split(rest, TITLE)?;
    let (before_json, rest) = split(rest, JSON)?;
    let (before_tables, end) = split(rest, TABLES)?;
    let title = escaped(title);
    Ok(format!(
        "{start}{POLICY}; connect-src 'self'{before_title}{title}{before_json}{{\"schema\":\"{LIVE_SCHEMA}\"}}{before_tables}{end}"
    ))
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

/// Counts the bytes that are written.
struct Counter(usize);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Size of a value in the JSON block.
fn json_size(value: &(impl Serialize + ?Sized)) -> Result<usize, Error> {
    let mut counter = Counter(0);
    serde_json::to_writer(WithoutTags(&mut counter), value)?;
    Ok(counter.0)
}

/// Encodes the tables so that they and their tokens have at most `available` bytes in the page. Omits first the router weights, then the
/// spans, then records at the end.
fn fit(tables: &[Tables], available: usize) -> Result<(Vec<Block>, Contents), Error> {
    let most = tables.iter().map(|tables| tables.records.len()).max();
    let mut contents = Contents {
        weights: true,
        spans: true,
        records: most.unwrap_or(0),
    };
    loop {
        let blocks = encode(tables, contents)?;
        let mut size: usize = blocks.iter().map(Block::size).sum();
        for tables in tables {
            size += tables.tokens_size(&tables.rows(contents))?;
        }
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
        let rows = tables.rows(contents);
        let mut add = |name: &str, n: usize, columns: &dyn Fn() -> Vec<table::Column>| {
            if n > 0 {
                blocks.push(Block {
                    id: format!("table-{input}-{name}"),
                    parquet: table::encode(&columns())?,
                });
            }
            Ok::<(), Error>(())
        };
        add("records", rows.records, &|| {
            tables.records.columns(rows.records)
        })?;
        add("routing", rows.routing, &|| {
            tables.routing.columns(rows.routing, contents.weights)
        })?;
        add("spans", rows.spans, &|| tables.spans.columns(rows.spans))?;
    }
    Ok(blocks)
}

impl Tables {
    /// The rows with these contents: the first records, and everything until the start of the last of them.
    fn rows(&self, contents: Contents) -> Rows {
        let n_records = contents.records.min(self.records.len());
        let mut rows = Rows {
            records: n_records,
            routing: self.routing.len(),
            spans: self.spans.len(),
        };
        if n_records < self.records.len() {
            let last = n_records.checked_sub(1);
            let end = last.and_then(|last| self.records.start.get(last).copied());
            let end = end.unwrap_or(-1);
            let starts = self.routing.starts();
            rows.routing = starts.partition_point(|&start| start <= end);
            rows.spans = self.spans.n_until(end);
        }
        if !contents.spans {
            rows.spans = 0;
        }
        rows
    }

    /// Number of tokens up to the last one that a row refers to; all tokens if no record is omitted.
    fn n_tokens(&self, rows: &Rows) -> usize {
        let all = self.tokens.text.len();
        if rows.records == self.records.len() {
            return all;
        }
        let records = self.records.token.iter().take(rows.records).copied();
        let routing = self.routing.tokens().iter().take(rows.routing).copied();
        let spans = self.spans.tokens().take(rows.spans);
        let last = records.chain(routing).chain(spans).max().unwrap_or(-1);
        usize::try_from(last.saturating_add(1)).map_or(0, |n| n.min(all))
    }

    /// Size of the tokens of these rows in the JSON block.
    fn tokens_size(&self, rows: &Rows) -> Result<usize, Error> {
        let (tokens, n) = (&self.tokens, self.n_tokens(rows));
        Ok(json_size(&tokens.text[..n])?
            + json_size(&tokens.phase[..n])?
            + json_size(&tokens.sequence[..n])?
            + json_size(&tokens.position[..n])?
            + json_size(&tokens.start[..n])?)
    }
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
                "Input {number}: the report contains the first {n} of {all} records and their tokens, {because}."
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
        let numbers: Vec<u32> = (0..).take(n).collect();
        Tables {
            records: Records::of_routing(&routing, |_, _| None),
            routing,
            spans: Spans::default(),
            tokens: Tokens {
                text: vec![Some("<".to_owned()); n],
                phase: vec![0; n],
                sequence: vec![0; n],
                start: numbers.iter().map(|&number| number.into()).collect(),
                position: numbers,
            },
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
    fn live_page_may_only_connect_to_its_server() {
        let page = live_page("a & <b>").unwrap();
        assert!(page.contains("content=\"default-src 'none'; connect-src 'self'; script-src"));
        assert!(page.contains("<title>a &amp; &lt;b&gt;</title>"), "title");
        assert!(page.contains("id=\"report\">{\"schema\":\"moe-analyze.live.v1\"}</script>"));
        for marker in [TITLE, JSON, TABLES] {
            assert!(!page.contains(marker), "{marker}");
        }
        assert!(page.len() <= 250_000, "{} bytes", page.len());
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
        let tokens = |contents| {
            let rows = tables[0].rows(contents);
            tables[0].tokens_size(&rows).unwrap()
        };
        let size = all.iter().map(Block::size).sum::<usize>() + tokens(contents);
        let (_, contents) = fit(&tables, size - 1).unwrap();
        assert_eq!((contents.weights, contents.records), (false, 20_000));
        let (few, contents) = fit(&tables, size / 4).unwrap();
        assert!(
            contents.records < 10_000 && contents.records > 100,
            "{contents:?}"
        );
        let few = few.iter().map(Block::size).sum::<usize>();
        assert!(few + tokens(contents) <= size / 4);
        assert_eq!(notes(&tables, contents).len(), 2);
    }

    /// Each record has its own token here, so that there are as many tokens as records.
    #[test]
    fn shortens_tokens_with_the_records() {
        let tables = tables(20_000);
        let contents = |records| Contents {
            weights: true,
            spans: true,
            records,
        };
        for n in [0, 1, 700, 20_000] {
            let rows = tables.rows(contents(n));
            assert_eq!((rows.records, rows.routing), (n, n));
            assert_eq!(tables.n_tokens(&rows), n);
        }
        let one = tables.tokens_size(&tables.rows(contents(1))).unwrap();
        assert_eq!(one, r#"["\u003c"][0][0][0][0]"#.len());
        let mut tokens = tables.tokens;
        tokens.truncate(700);
        assert_eq!((tokens.text.len(), tokens.start.len()), (700, 700));
    }
}
