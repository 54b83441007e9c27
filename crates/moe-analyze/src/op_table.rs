//! The operation names of a trace without a manifest, from a file of the user.

use std::path::Path;

use anyhow::{anyhow, bail};
use moe_files::csv::{self, Fields, LineFault, LineReader};
use moe_trace::bounded;
use moe_trace::ops::OpTable;

/// Reads lines `number,name`. The first line may be a header. If it names both columns, they can be in any order, and other columns
/// are ignored.
///
/// # Errors
/// A line is invalid; the error contains the file and the line.
pub fn read(path: &Path) -> anyhow::Result<OpTable> {
    let text = bounded::read_text(path)?;
    let mut reader = LineReader::default();
    let mut columns = Columns::default();
    let mut ops = Vec::new();
    for (n, (line, text)) in csv::lines(&text).enumerate() {
        let fields = reader.fields(text);
        match fields.map(|fields| (columns.op(fields), fields)) {
            Ok((Some(op), _)) => ops.push(op),
            // A header does not start with a number.
            Ok((None, names)) if n == 0 && !starts_with_number(names) => {
                let named = Columns::of_header(names);
                let named =
                    named.map_err(|fault| anyhow!("{}: line {line}: {fault}", path.display()))?;
                columns = named.unwrap_or_default();
            }
            Ok(_) | Err(LineFault::TooManyFields) => bail!(
                "{}: line {line}: expected `number,name` with a number from 0 to 255; write one operation per line, \
                 and a header with these two names if there are more columns",
                path.display()
            ),
            Err(fault) => bail!("{}: line {line}: {fault}", path.display()),
        }
    }
    if ops.is_empty() {
        bail!(
            "{}: the file contains no operation; write lines `number,name`",
            path.display()
        );
    }
    Ok(ops.into_iter().collect())
}

fn starts_with_number(fields: Fields<'_>) -> bool {
    fields
        .get(0)
        .is_some_and(|field| field.parse::<u64>().is_ok())
}

/// Indices of the columns.
struct Columns {
    number: usize,
    name: usize,
    n: usize,
}

impl Default for Columns {
    fn default() -> Columns {
        Columns {
            number: 0,
            name: 1,
            n: 2,
        }
    }
}

impl Columns {
    /// Returns the columns of a header that names both.
    fn of_header(names: Fields<'_>) -> Result<Option<Columns>, LineFault> {
        let indices = (names.column_index("number")?, names.column_index("name")?);
        let (Some(number), Some(name)) = indices else {
            return Ok(None);
        };
        let n = names.len();
        Ok(Some(Columns { number, name, n }))
    }

    fn op(&self, fields: Fields<'_>) -> Option<(u8, String)> {
        let (number, name) = (fields.get(self.number)?, fields.get(self.name)?);
        let is_op = fields.len() == self.n && !name.is_empty();
        is_op.then_some((number.parse().ok()?, name.to_owned()))
    }
}
