//! SQL queries over Parquet tables: those of runs, of traces of other tools, and of models.
//!
//! polars parses, plans and computes; the tables are read by the reader of [`moe_trace::tables`], which bounds the memory that
//! a damaged file can claim. A table of more rows than [`QueryOptions::step_rows`] is read in steps wherever the query permits
//! it, see [`Database::query`].
//!
//! Integers are signed and have 64 bits, floating-point numbers have 64 bits, so that differences and sums do not wrap or lose
//! digits. Only `buffer_id`, which may use all 64 bits, stays unsigned.

mod catch;
mod columns;
mod merge;
mod plan;
mod rows;
mod scan;
mod steps;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use polars::prelude::*;
use polars::sql::{SQLContext, extract_table_identifiers};

use catch::catch;
pub use rows::{Rows, Value};
use scan::Session;
use table::Table;

/// Column that names the run of a row, in tables of several runs.
pub const RUN_COLUMN: &str = "run";

/// Why a query has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A statement that is not a query.
    #[error(
        "{statement} is not supported: tables are only read; write a query that starts with SELECT, WITH, FROM, VALUES, SHOW TABLES or EXPLAIN"
    )]
    NotAQuery {
        /// Its first word.
        statement: String,
    },
    /// The query has a syntax error, names what does not exist, mixes types, or uses what the SQL dialect does not have.
    #[error("the query is not valid: {source}")]
    Query {
        /// What polars says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The query engine panicked.
    #[error("the query engine failed: {message}; write the query in another way")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// A table of several files of which one lacks a column.
    #[error(
        "{}: no column {column}, which {} has; give tables with the same columns",
        path.display(),
        first.display()
    )]
    Columns {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// The first file of the table.
        first: PathBuf,
    },
    /// A table could not be read.
    #[error(transparent)]
    Trace(#[from] moe_trace::Error),
}

/// How a query is run.
#[derive(Clone, Debug)]
pub struct QueryOptions {
    /// Rows of a table that are read at a time where a query can be run in steps.
    pub step_rows: u64,
    /// Counts the rows that are read.
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
}

impl Database {
    /// Adds the rows of a Parquet file to a table, which is created if need be. `run` is the value of their column
    /// [`RUN_COLUMN`], which a table has if one of its files has a run.
    ///
    /// Columns of types without an SQL counterpart here, such as lists, are left out.
    ///
    /// # Errors
    /// [`Error::Trace`] if the file cannot be read, [`Error::Columns`] if it lacks a column of the table's first file.
    pub fn add(&mut self, table: &str, path: &Path, run: Option<&str>) -> Result<(), Error> {
        let table = self.tables.entry(table.to_owned()).or_default();
        table.add(path, run)
    }

    /// The tables with their columns.
    pub fn tables(&self) -> impl Iterator<Item = (&str, Vec<&str>)> {
        let tables = self.tables.iter();
        tables.map(|(name, table)| (name.as_str(), table.column_names()))
    }

    /// Rows of all tables, as their files claim.
    pub fn n_rows(&self) -> u64 {
        self.tables.values().map(Table::n_rows).sum()
    }

    /// Runs a query.
    ///
    /// A table of more than [`QueryOptions::step_rows`] rows is read in steps, so that it may be larger than memory, where the
    /// query selects, filters or computes row by row, or aggregates such rows with COUNT, SUM, AVG, MIN or MAX (with or without
    /// GROUP BY), removes duplicates (DISTINCT), or sorts with a LIMIT. In a join one table is read in steps, the other one
    /// is held in memory. For everything else (COUNT(DISTINCT …), MEDIAN, window functions, IN (SELECT …), sorting all rows) the columns
    /// and rows that the query needs are held in memory. So are groups.
    ///
    /// # Errors
    /// See [`Error`]; errors of the reader may also come from the rows.
    pub fn query(&self, sql: &str, options: &QueryOptions) -> Result<Rows, Error> {
        check_statement(sql)?;
        let session = Arc::new(Session::new(options));
        let planned = catch(|| {
            let mut context = SQLContext::new();
            for (name, table) in &self.tables {
                context.register(name, scan::frame(table, &session)?);
            }
            let plan = plan::prepared(&context.execute(sql)?.logical_plan);
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
}

/// The names of the tables that a query reads, and of its common table expressions.
///
/// # Errors
/// [`Error::NotAQuery`]; [`Error::Query`] for a syntax error.
pub fn table_names(sql: &str) -> Result<Vec<String>, Error> {
    check_statement(sql)?;
    catch(|| extract_table_identifiers(sql, false, true))
}

/// Refuses statements that change tables.
fn check_statement(sql: &str) -> Result<(), Error> {
    const QUERIES: [&str; 7] = [
        "SELECT", "WITH", "FROM", "VALUES", "TABLE", "SHOW", "EXPLAIN",
    ];
    let word = first_word(sql).to_uppercase();
    match word.as_str() {
        "" => Err(Error::NotAQuery {
            statement: "an empty statement".into(),
        }),
        word if QUERIES.contains(&word) => Ok(()),
        word => Err(Error::NotAQuery {
            statement: word.to_owned(),
        }),
    }
}

/// The first word after comments and opening parentheses.
fn first_word(sql: &str) -> &str {
    let mut rest = sql;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '(');
        let comment_end = if rest.starts_with("--") {
            rest.find('\n').map(|at| at + 1)
        } else if rest.starts_with("/*") {
            rest.find("*/").map(|at| at + 2)
        } else {
            let end = rest.find(|c: char| c.is_whitespace() || "(;*'\"".contains(c));
            return &rest[..end.unwrap_or(rest.len())];
        };
        rest = &rest[comment_end.unwrap_or(rest.len())..];
    }
}
