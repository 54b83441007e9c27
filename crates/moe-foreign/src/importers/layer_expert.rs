//! `layer,expert` CSV of llama.cpp's `moe-trace` (its PR 28544): a line for each choice. Further columns are ignored.
//!
//! Neither tokens nor their number of experts are recorded. Where the number is known from the user or the model, the lines of a
//! layer are split into tokens; without it the choices can only be counted.

use moe_files::csv::LineReader;
use moe_gguf::text::counted;
use moe_trace::{CountRow, ExpertId, LayerId, RoutingRow, TokenId};

use crate::passes::Passes;
use crate::source::{Lines, sample_lines};
use crate::{At, ForeignError, ImportOptions, Importer, Missing, Output, Source};

use super::text::{Columns, TextFault, are_integers, has_columns, required_number};

const COLUMNS: [&str; 2] = ["layer", "expert"];
/// Columns of tables with a line for each expert, such as sizes and plans: their lines are not choices.
const OF_EXPERTS: [&str; 4] = ["bytes", "count", "hits", "activations"];
/// Choices of a layer in a row that are held; a longer batch is read in pieces.
const MAX_HELD: usize = 1 << 20;

/// `layer,expert` CSV.
pub struct LayerExpert;

impl Importer for LayerExpert {
    fn name(&self) -> &'static str {
        "layer-expert"
    }

    fn description(&self) -> &'static str {
        "layer,expert CSV of llama.cpp's moe-trace: a line for each choice"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let mut lines = sample_lines(sample);
        let Some(header) = lines.next() else {
            return false;
        };
        has_columns(header, &COLUMNS)
            && !OF_EXPERTS.iter().any(|&name| has_columns(header, &[name]))
            && lines.next().is_none_or(|line| has_choice(header, line))
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
                "tokens were separated by {}{} for each token, passes by their layers; phases and weights are not recorded",
                if options.has_one_top_k() { "" } else { "up to " },
                counted(k, "expert")
            )),
            None => {
                output.note("the choices were counted, without tokens");
                output.missing(Missing::TopK);
            }
        }
        for file in source.files() {
            output.begin_file(file);
            let mut lines = Lines::open(file)?;
            let header = lines.next_line()?.map_or("", |(_, text)| text);
            let found = Columns::of(header, COLUMNS, COLUMNS.len(), output);
            let mut columns = found.map_err(|fault| lines.invalid(fault))?;
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
fn has_choice(header: &str, line: &str) -> bool {
    let [mut names, mut values] = [LineReader::default(), LineReader::default()];
    let (Ok(names), Ok(values)) = (names.fields(header), values.fields(line)) else {
        return false;
    };
    let columns = names.iter().zip(values.iter());
    let known = columns.filter(|(column, _)| COLUMNS.contains(column));
    are_integers(known.map(|(_, value)| value))
}

/// Layer and expert of a line.
fn choice(columns: &mut Columns<2>, text: &str) -> Result<(LayerId, ExpertId), TextFault> {
    let [layer, expert] = columns.fields(text)?;
    Ok((
        required_number("layer", layer)?,
        required_number("expert", expert)?,
    ))
}

/// Hands every choice to `take`: the number of its line, layer and expert. A last line that is cut is noted and left out.
fn each_choice<'o>(
    mut lines: Lines,
    columns: &mut Columns<2>,
    output: &mut Output<'o>,
    mut take: impl FnMut(u64, LayerId, ExpertId, &mut Output<'o>) -> Result<(), ForeignError>,
) -> Result<(), ForeignError> {
    while let Some((line, text)) = lines.next_line()? {
        match choice(columns, text) {
            Ok((layer_id, expert_id)) => take(line, layer_id, expert_id, output)?,
            Err(fault) => lines.cut_or(lines.invalid(fault), output)?,
        }
    }
    Ok(())
}

fn count(
    lines: Lines,
    columns: &mut Columns<2>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    each_choice(
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
            output.count(|| At::Line(line), &row)
        },
    )
}

/// The choices of one layer in a row, until the layer changes.
struct Tokens<'a> {
    options: &'a ImportOptions,
    /// Experts of a token in the layer.
    top_k: usize,
    passes: Passes,
    layer_id: LayerId,
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
        each_choice(
            lines,
            columns,
            output,
            |line, layer_id, expert_id, output| {
                let is_full =
                    self.experts.len() >= MAX_HELD && self.experts.len().is_multiple_of(self.top_k);
                if layer_id != self.layer_id || is_full {
                    self.hand_over(output, false)?;
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
        self.hand_over(output, true)
    }

    fn hand_over(&mut self, output: &mut Output<'_>, at_end: bool) -> Result<(), ForeignError> {
        let rest = self.experts.len() % self.top_k;
        if rest > 0 && !at_end {
            let reason = format!(
                "layer {} has {} in a row from here, which is not a multiple of the {} for a token; is that the number of the trace?",
                self.layer_id,
                counted(self.experts.len(), "choice"),
                counted(self.top_k, "expert")
            );
            return Err(output.invalid(At::Line(self.first_line), reason));
        }
        if rest > 0 {
            output.note(format!(
                "left out: {} of the last token, which is cut",
                counted(rest, "choice")
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
            output.token(|| At::Line(line), &row, experts)?;
        }
        self.experts.clear();
        Ok(())
    }
}
