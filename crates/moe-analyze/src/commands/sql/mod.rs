//! `sql`: queries over the tables of runs, traces and models.

mod inputs;
mod parquet_files;
mod temporary;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::anyhow;
use moe_analysis::sql::{self, Database, Rows, Value};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::output::{self, Cell, Format, RowOutputArgs, write_streamed};
use crate::progress::Progress;
use crate::traces::TraceArgs;

use inputs::QueryInput;
use temporary::Temporary;

/// Run an SQL query over the tables of runs, traces and models
///
/// The tables are ops, accesses, routing, map and hotness. A trace of another tool has the tables routing and hotness, or only hotness if
/// it contains counts without tokens. A model has the table map. SHOW TABLES lists the tables of the inputs. The rows of several inputs are
/// in one table, with the run in the column `run`. docs/sql.md describes the tables and contains examples.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze sql \"SELECT layer_id, AVG(duration_ns) FROM ops GROUP BY layer_id\" runs/first"
)]
pub struct Args {
    /// SQL query
    query: String,
    /// Run directories, traces, Parquet tables, directories of tables, GGUF models, or traces of other tools
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    #[command(flatten)]
    rows: RowOutputArgs,
    #[command(flatten)]
    trace: TraceArgs,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    args.rows.check()?;
    let queried = sql::table_names(&args.query);
    let inputs = inputs::open(&args.inputs, &args.trace, ctx)?;
    let queried: BTreeSet<String> = match queried {
        Ok(queried) => queried.into_iter().collect(),
        Err(error) => {
            return Err(with_tables(
                error,
                &inputs,
                &BTreeSet::new(),
                &Database::default(),
            ));
        }
    };
    let mut temporary = Temporary::new(args.rows.file().map(|file| &**file));
    let database = database(&inputs, &queried, &mut temporary, ctx)?;
    let query = || {
        let options = sql::QueryOptions::default();
        let progress = Progress::following(ctx, "rows", database.n_rows(), options.n_read.clone());
        let rows = database.query(&args.query, &options);
        let rows = rows.map_err(|error| with_tables(error, &inputs, &queried, &database))?;
        anyhow::Ok((rows, progress))
    };
    args.rows.write_file(ctx, |file, format| {
        let (rows, _progress) = query()?;
        write(rows, |columns, rows| {
            Ok(write_streamed(file, format, columns, rows)?)
        })
    })?;
    if args.rows.prints() {
        let (rows, _progress) = query()?;
        let format = args.rows.format().unwrap_or(Format::Table);
        write(rows, |columns, rows| {
            output::to_stdout(format, |stdout| {
                write_streamed(stdout, format, columns, rows)
            })
        })?;
    }
    Ok(ExitStatus::Done)
}

/// Returns the tables in the query that the inputs have. A query without tables may be SHOW TABLES, which lists all tables of
/// the inputs.
fn database(
    inputs: &[QueryInput],
    queried: &BTreeSet<String>,
    temporary: &mut Temporary,
    ctx: &Context,
) -> anyhow::Result<Database> {
    let mut database = Database::default();
    if queried.is_empty() {
        for table in inputs::present_tables(inputs) {
            database.add_name(table);
        }
    }
    for input in inputs {
        for file in input.files(queried, temporary, ctx)? {
            let run = (inputs.len() > 1 || file.is_partition).then_some(file.run.as_str());
            database.add(file.table, &file.path, run)?;
        }
    }
    let has_table = |table: &str| database.tables().any(|(name, _)| name == table);
    for table in queried.iter().filter(|table| has_table(table)) {
        let lacking = inputs
            .iter()
            .filter(|input| !input.tables().contains(&table.as_str()));
        for input in lacking {
            ctx.note(format_args!(
                "warning: {} has no table {table}, so the result does not include it",
                input.path().display()
            ));
        }
    }
    Ok(database)
}

/// Adds the available tables to the error of a query, or the columns of the tables in the query.
fn with_tables(
    error: sql::Error,
    inputs: &[QueryInput],
    queried: &BTreeSet<String>,
    database: &Database,
) -> anyhow::Error {
    if !matches!(error, sql::Error::Query { .. }) {
        return error.into();
    }
    let tables: Vec<(&str, Vec<&str>)> = database.tables().collect();
    if queried
        .iter()
        .all(|name| tables.iter().any(|(table, _)| table == name))
        && !tables.is_empty()
    {
        let mut text = error.to_string();
        for (_, columns) in &tables {
            // polars lists the columns, too.
            text = text.replace(&format!("; valid columns: {columns:?}"), "");
        }
        let columns = tables
            .iter()
            .map(|(table, columns)| format!("{table} ({})", columns.join(", ")));
        let columns: Vec<String> = columns.collect();
        return anyhow!("{text}; tables: {}", columns.join(", "));
    }
    anyhow!(
        "{error}; tables of {}: {}",
        inputs::names(inputs),
        inputs::present_tables(inputs).join(", ")
    )
}

/// Prints the rows of a result until the first error.
fn write(
    rows: Rows,
    print: impl FnOnce(&[&str], &mut dyn Iterator<Item = Vec<Cell<'static>>>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let columns = rows.columns().to_vec();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let mut failed = None;
    let mut cells = rows.map_while(|row| match row {
        Ok(row) => Some(row.into_iter().map(cell).collect()),
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    let printed = print(&columns, &mut cells);
    match failed {
        Some(error) => Err(error.into()),
        None => printed,
    }
}

fn cell(value: Value) -> Cell<'static> {
    match value {
        Value::Null => Cell::Null,
        Value::Int(value) => match u64::try_from(value) {
            Ok(value) => Cell::Int(value),
            Err(_) => Cell::Json(value.into()),
        },
        Value::UInt(value) => Cell::Int(value),
        Value::Float(value) => Cell::Float(value),
        Value::Text(text) => Cell::from(text),
        value => Cell::Json(json(value)),
    }
}

fn json(value: Value) -> serde_json::Value {
    match value {
        Value::Null => serde_json::Value::Null,
        Value::Bool(value) => value.into(),
        Value::Int(value) => value.into(),
        Value::UInt(value) => value.into(),
        // Numbers that are not finite become null.
        Value::Float(value) => value.into(),
        Value::Text(text) => text.into(),
        Value::List(values) => values.into_iter().map(json).collect(),
        Value::Struct(fields) => {
            let fields = fields.into_iter().map(|(name, value)| (name, json(value)));
            serde_json::Value::Object(fields.collect())
        }
    }
}
