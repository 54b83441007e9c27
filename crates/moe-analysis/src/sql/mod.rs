//! SQL queries over Parquet tables: those of runs, of traces of other tools, and of models.
//!
//! polars parses, plans and computes. The reader of [`moe_trace::tables`] reads the tables and bounds the memory that a
//! damaged file can request. Tables with more rows than [`QueryOptions::step_rows`] are read in steps if the query permits
//! it, see [`Database::query`].
//!
//! Integers are signed and have 64 bits, and floating-point numbers have 64 bits, so that differences and sums neither wrap
//! nor lose digits. Only `buffer_id`, which may use all 64 bits, is unsigned.

mod catch;
mod columns;
mod complexity;
mod merge;
mod plan;
mod rows;
mod scan;
mod steps;
mod table;
#[cfg(test)]
mod tests;
mod tokens;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use polars::prelude::*;
use polars::sql::{SQLContext, extract_table_identifiers};
use sqlparser::tokenizer::Token;

use catch::catch;
pub use rows::{Rows, Value};
use scan::Session;
use table::Table;

/// Column with the run of a row, in tables of several runs.
pub const RUN_COLUMN: &str = "run";

/// Reason why a query has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The statement is not a query.
    #[error(
        "the query starts with {word}; tables are read-only, so a query must start with SELECT, WITH, FROM, VALUES, SHOW TABLES or EXPLAIN"
    )]
    NotAQuery {
        /// First word of the statement.
        word: String,
    },
    /// The query contains no words.
    #[error("the query is empty; write a query that starts with SELECT")]
    Empty,
    /// The query has a syntax error, unknown names, wrong types, or an unsupported feature.
    #[error("the query is not valid: {source}")]
    Query {
        /// The error of polars.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The query is too long or too complex.
    #[error(
        "the query has {what}; split it into several queries, or replace a chain of OR by IN (…)"
    )]
    TooComplex {
        /// The limit that it exceeds.
        what: String,
    },
    /// The thread of the query cannot be started.
    #[error("there is not enough memory to run the query: {source}")]
    Thread {
        /// The error of the system.
        source: std::io::Error,
    },
    /// The query engine panicked.
    #[error("the query engine failed: {message}; rewrite the query")]
    Panicked {
        /// The panic message.
        message: String,
    },
    /// A table has several files, one of which lacks a column.
    #[error(
        "{}: no column {column}, which {} has; pass tables with the same columns",
        path.display(),
        first.display()
    )]
    Columns {
        /// The file without the column.
        path: PathBuf,
        /// Name of the column.
        column: String,
        /// First file of the table.
        first: PathBuf,
    },
    /// A table cannot be read.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
}

/// Options of a query.
#[derive(Clone, Debug)]
pub struct QueryOptions {
    /// Number of rows of a table that are read at a time, if the query can run in steps.
    pub step_rows: u64,
    /// Counter of the rows that have been read.
    pub n_read: Arc<AtomicU64>,
}

impl Default for QueryOptions {
    fn default() -> Self {
        Self {
            step_rows: 4 << 20,
            n_read: Arc::default(),
        }
    }
}

/// Tables by name.
#[derive(Default)]
pub struct Database {
    tables: BTreeMap<String, Table>,
    /// Names that SHOW TABLES lists, in this order.
    names: Vec<String>,
}

impl Database {
    /// Adds a name to the result of SHOW TABLES. The table needs no file.
    pub fn add_name(&mut self, table: &str) {
        if !self.names.iter().any(|name| name == table) {
            self.names.push(table.to_owned());
        }
    }

    /// Adds a Parquet file to a table, which is created if it does not exist. `run` is the value of the column
    /// [`RUN_COLUMN`] for its rows. A table has this column if one of its files has a run.
    ///
    /// Columns of types that are not supported, such as lists, are omitted.
    ///
    /// # Errors
    /// [`Error::Trace`] if the file cannot be read, [`Error::Columns`] if it lacks a column of the table's first file.
    pub fn add(&mut self, table: &str, path: &Path, run: Option<&str>) -> Result<(), Error> {
        self.add_name(table);
        let table = self.tables.entry(table.to_owned()).or_default();
        table.add(path, run)
    }

    /// Names of the tables with files, and their columns.
    pub fn tables(&self) -> impl Iterator<Item = (&str, Vec<&str>)> {
        let tables = self.tables.iter();
        tables.map(|(name, table)| (name.as_str(), table.column_names()))
    }

    /// Number of rows of all tables, according to their metadata.
    pub fn n_rows(&self) -> u64 {
        self.tables.values().map(Table::n_rows).sum()
    }

    /// Runs a query.
    ///
    /// A table with more than [`QueryOptions::step_rows`] rows is read in steps, so that it may be larger than memory, if
    /// the query
    ///
    /// - selects, filters or computes row by row,
    /// - aggregates such rows with COUNT, SUM, AVG, MIN or MAX, with or without GROUP BY,
    /// - removes duplicates (DISTINCT),
    /// - or sorts with a LIMIT.
    ///
    /// In a join one table is read in steps, and the other one is held in memory. Other queries (COUNT(DISTINCT …), MEDIAN,
    /// window functions, IN (SELECT …), sorting of all rows) hold the required columns and rows in memory. Groups are held
    /// in memory.
    ///
    /// SHOW TABLES lists the tables of [`Database::add`] and [`Database::add_name`] in the order in which they were added.
    ///
    /// # Errors
    /// See [`Error`]. The returned rows may also yield errors of the reader.
    pub fn query(&self, sql: &str, options: &QueryOptions) -> Result<Rows, Error> {
        check_statement(sql)?;
        check_show_tables(sql)?;
        self.check_common_tables(&complexity::check(sql)?)?;
        let session = Arc::new(Session::new(options));
        let planned = catch(|| {
            let mut context = SQLContext::new();
            for (name, table) in &self.tables {
                context.register(name, scan::frame(table, &session)?);
            }
            let mut result = context.execute(sql)?;
            if is_show_tables(sql) {
                // The result of polars lacks tables without files, and is sorted.
                let names = Column::new("name".into(), self.names.clone());
                result = DataFrame::new_infer_height(vec![names])?.lazy();
            }
            let plan = plan::prepared(&result.logical_plan);
            let columns = LazyFrame::from(plan.clone()).collect_schema()?;
            let plan = merge::reduced(plan, options.step_rows)?;
            let frames = steps::frames(plan, options.step_rows)?;
            Ok((
                columns.iter_names().map(ToString::to_string).collect(),
                frames,
            ))
        });
        let (columns, frames) = planned.map_err(|error| session.explain(error))?;
        Ok(Rows::new(columns, frames, session))
    }

    /// Rejects common table expressions with the name of a table, which polars ignores.
    fn check_common_tables(&self, tokens: &[Token]) -> Result<(), Error> {
        let names = tokens::common_tables(tokens);
        match names.iter().find(|&&name| self.tables.contains_key(name)) {
            Some(name) => Err(Error::Query {
                source: format!(
                    "the common table expression {name} has the name of a table; use another name"
                )
                .into(),
            }),
            None => Ok(()),
        }
    }
}

/// Names of the tables and common table expressions that a query reads.
///
/// # Errors
/// [`Error::NotAQuery`]; [`Error::Empty`]; [`Error::TooComplex`]; [`Error::Query`] for a syntax error.
pub fn table_names(sql: &str) -> Result<Vec<String>, Error> {
    check_statement(sql)?;
    complexity::check(sql)?;
    catch(|| extract_table_identifiers(sql, false, true))
}

/// Whether a statement that polars executes is SHOW TABLES. polars rejects all other SHOW statements.
fn is_show_tables(sql: &str) -> bool {
    first_word(sql).eq_ignore_ascii_case("SHOW")
}

/// Rejects SHOW TABLES with LIKE or other conditions, which polars ignores.
fn check_show_tables(sql: &str) -> Result<(), Error> {
    let mut words = sql.trim_end_matches([';', ' ', '\n']).split_whitespace();
    let is_next = |words: &mut std::str::SplitWhitespace<'_>, word: &str| {
        words
            .next()
            .is_some_and(|next| next.eq_ignore_ascii_case(word))
    };
    if is_next(&mut words, "SHOW") && is_next(&mut words, "TABLES") && words.next().is_some() {
        return Err(Error::Query {
            source: "SHOW TABLES with a condition is not supported; write SHOW TABLES".into(),
        });
    }
    Ok(())
}

/// Rejects statements that are not queries.
fn check_statement(sql: &str) -> Result<(), Error> {
    const QUERIES: [&str; 7] = [
        "SELECT", "WITH", "FROM", "VALUES", "TABLE", "SHOW", "EXPLAIN",
    ];
    let word = first_word(sql).to_uppercase();
    match word.as_str() {
        "" => Err(Error::Empty),
        word if QUERIES.contains(&word) => Ok(()),
        word => Err(Error::NotAQuery {
            word: word.to_owned(),
        }),
    }
}

/// First word after comments and opening parentheses, or `*` or a quote at its place.
fn first_word(sql: &str) -> &str {
    let mut rest = sql;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '(');
        let comment_end = if rest.starts_with("--") {
            rest.find('\n').map(|at| at + 1)
        } else if rest.starts_with("/*") {
            rest.find("*/").map(|at| at + 2)
        } else if rest.starts_with(['*', '\'', '"']) {
            return &rest[..1];
        } else {
            let end = rest.find(|c: char| c.is_whitespace() || "(;*'\"".contains(c));
            return &rest[..end.unwrap_or(rest.len())];
        };
        rest = &rest[comment_end.unwrap_or(rest.len())..];
    }
}
