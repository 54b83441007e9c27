//! CSV of the `moe-trace` example of llama.cpp ([PR 28544](https://github.com/ggml-org/llama.cpp/pull/28544)): one line per selected
//! expert.
//!
//! ```text
//! layer,expert
//! 0,5
//! 0,1
//! ```
//!
//! Lines are in the order of the graph: for each layer of a pass, the experts of each token. Further columns are ignored. If the
//! top-k is known ([`ImportOptions`]), the lines of a layer are split into tokens, and positions are derived from the order of layers
//! ([`crate::passes`]). Otherwise the file is read as counts. Compared with our records, the format lacks token positions,
//! sequences, phases, router weights, timestamps and lanes.

use moe_files::csv::LineReader;
use moe_files::text::counted;
use moe_trace::{CountRow, ExpertId, LayerId, RoutingRow, TokenId};

use crate::passes::Passes;
use crate::source::{Lines, sample_lines};
use crate::{ForeignError, ImportOptions, Importer, Location, Missing, Output, Source};

use super::shared::text::{Columns, LineError, are_integers, has_columns, required_number};

const COLUMNS: [&str; 2] = ["layer", "expert"];
/// Columns of tables with one line per expert, such as sizes and plans, which are not traces.
const NOT_TRACE_COLUMNS: [&str; 4] = ["bytes", "count", "hits", "activations"];
/// Maximum number of consecutive experts of a layer in memory. Longer batches are split.
const MAX_HELD: usize = 1 << 20;

/// Importer of `layer,expert` CSV.
pub struct LayerExpert;

impl Importer for LayerExpert {
    fn name(&self) -> &'static str {
        "layer-expert"
    }

    fn description(&self) -> &'static str {
        "layer,expert CSV of llama.cpp's moe-trace example: routing if the top-k is known, else counts"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let mut lines = sample_lines(sample);
        let Some(header) = lines.next() else {
            return false;
        };
        has_columns(header, &COLUMNS)
            && !NOT_TRACE_COLUMNS
                .iter()
                .any(|&name| has_columns(header, &[name]))
            && lines.next().is_none_or(|line| has_integers(header, line))
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let top_k = options.max_expert_used();
        match top_k {
            Some(k) => output.note(format!(
                "lines are grouped into tokens of {}{}, and into passes by the order of layers; phases and router weights are not recorded",
                if options.has_uniform_top_k() { "" } else { "up to " },
                counted(k, "expert")
            )),
            None => {
                output.note("the lines are read as counts, without tokens");
                output.missing(Missing::TopK);
            }
        }
        for file in source.files() {
            output.begin_file(file);
            let mut lines = Lines::open(file)?;
            let header = lines.next_line()?.map_or("", |(_, text)| text);
            let found = Columns::of(header, COLUMNS, COLUMNS.len(), output);
            let mut columns = found.map_err(|error| lines.invalid(error))?;
            match top_k {
                Some(top_k) => {
                    Tokens::new(top_k as usize, options).read(lines, &mut columns, output)?
                }
                None => count(lines, &mut columns, output)?,
            }
        }
        Ok(())
    }
}

/// Whether a line has integers in the known columns.
fn has_integers(header: &str, line: &str) -> bool {
    let [mut names, mut values] = [LineReader::default(), LineReader::default()];
    let (Ok(names), Ok(values)) = (names.fields(header), values.fields(line)) else {
        return false;
    };
    let columns = names.iter().zip(values.iter());
    let known = columns.filter(|(column, _)| COLUMNS.contains(column));
    are_integers(known.map(|(_, value)| value))
}

/// Layer and expert of a line.
fn parse(columns: &mut Columns<2>, text: &str) -> Result<(LayerId, ExpertId), LineError> {
    let [layer, expert] = columns.fields(text)?;
    Ok((
        required_number("layer", layer)?,
        required_number("expert", expert)?,
    ))
}

/// Calls `import` with line number, layer and expert of each line. A truncated last line is skipped with a note.
fn for_each_line<'o>(
    mut lines: Lines,
    columns: &mut Columns<2>,
    output: &mut Output<'o>,
    mut import: impl FnMut(u64, LayerId, ExpertId, &mut Output<'o>) -> Result<(), ForeignError>,
) -> Result<(), ForeignError> {
    while let Some((line, text)) = lines.next_line()? {
        match parse(columns, text) {
            Ok((layer_id, expert_id)) => import(line, layer_id, expert_id, output)?,
            Err(error) => lines.skip_truncated(lines.invalid(error), output)?,
        }
    }
    Ok(())
}

fn count(
    lines: Lines,
    columns: &mut Columns<2>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    for_each_line(
        lines,
        columns,
        output,
        |line, layer_id, expert_id, output| {
            let row = CountRow {
                layer_id,
                expert_id,
                phase: None,
                count: 1,
                mass: None,
            };
            output.count(|| Location::Line(line), &row)
        },
    )
}

/// Groups consecutive lines of a layer into tokens.
struct Tokens<'a> {
    options: &'a ImportOptions,
    /// Experts per token in the current layer.
    top_k: usize,
    passes: Passes,
    layer_id: LayerId,
    /// Experts of the current layer.
    experts: Vec<ExpertId>,
    first_line: u64,
}

impl<'a> Tokens<'a> {
    fn new(top_k: usize, options: &'a ImportOptions) -> Self {
        Self {
            options,
            top_k,
            passes: Passes::default(),
            layer_id: LayerId(0),
            experts: Vec::new(),
            first_line: 0,
        }
    }

    fn read(
        mut self,
        lines: Lines,
        columns: &mut Columns<2>,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for_each_line(
            lines,
            columns,
            output,
            |line, layer_id, expert_id, output| {
                let is_full =
                    self.experts.len() >= MAX_HELD && self.experts.len().is_multiple_of(self.top_k);
                if layer_id != self.layer_id || is_full {
                    self.flush(output, false)?;
                }
                if self.experts.is_empty() {
                    self.first_line = line;
                    let top_k = self.options.n_expert_used_in(layer_id);
                    self.top_k = top_k.map_or(self.top_k, |k| k as usize);
                }
                self.layer_id = layer_id;
                self.experts.push(expert_id);
                Ok(())
            },
        )?;
        self.flush(output, true)
    }

    /// Passes on the tokens of the current layer. At the end of the file the last token may be incomplete.
    fn flush(&mut self, output: &mut Output<'_>, at_end: bool) -> Result<(), ForeignError> {
        let rest = self.experts.len() % self.top_k;
        if rest > 0 && !at_end {
            let reason = format!(
                "layer {} has {} from this line on, which is not a multiple of the top-k {}",
                self.layer_id,
                counted(self.experts.len(), "consecutive line"),
                self.top_k
            );
            return Err(output.wrong_top_k(Location::Line(self.first_line), reason));
        }
        if rest > 0 {
            output.note(format!(
                "skipped {} of the last token, which is truncated",
                counted(rest, "expert")
            ));
            self.experts.truncate(self.experts.len() - rest);
        }
        if self.experts.is_empty() {
            return Ok(());
        }
        let n_tokens = u32::try_from(self.experts.len() / self.top_k);
        let n_tokens = n_tokens.expect("MAX_HELD fits in 32 bits");
        let first = self.passes.layer(self.layer_id, n_tokens);
        for (token, experts) in (0..).zip(self.experts.chunks(self.top_k)) {
            let row = RoutingRow {
                token_id: TokenId(first.0.saturating_add(token)),
                ..RoutingRow::at_layer(self.layer_id)
            };
            let line = self.first_line;
            let experts = experts.iter().map(|&expert| (expert.0.into(), None));
            output.token(|| Location::Line(line), &row, experts)?;
        }
        self.experts.clear();
        Ok(())
    }
}
