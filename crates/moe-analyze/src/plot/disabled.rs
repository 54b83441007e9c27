//! Stands in for the plots in a build without the feature `plot`: the same types and functions, each of which is an error.
#![allow(dead_code)] // nothing reads what a plot would show

use std::path::Path;

use anyhow::anyhow;
use moe_analysis::overlap::OverlapReport;
use moe_files::AtomicFile;
use moe_trace::buffers::Timeline;
use moe_trace::transfers::Transfer;

/// The error of every plot.
fn disabled(path: &Path) -> anyhow::Error {
    anyhow!(
        "{}: this program was built without plots; build it with the feature `plot`, which is on by default",
        path.display()
    )
}

pub fn check_extension(path: &Path) -> anyhow::Result<()> {
    Err(disabled(path))
}

pub struct HeatMap {
    pub title: String,
    pub subtitle: String,
    pub layers: Vec<u32>,
    pub x_label: &'static str,
    pub values: Vec<Vec<f64>>,
}

impl HeatMap {
    pub fn prepare(&self, path: &Path, _force: bool) -> anyhow::Result<AtomicFile> {
        Err(disabled(path))
    }
}

pub struct Chart {
    pub title: String,
    pub subtitle: String,
    pub x_label: &'static str,
    pub y_label: &'static str,
    pub x: (f64, f64),
    pub y: (f64, f64),
    pub lines: Vec<Line>,
    pub legend: Legend,
}

impl Chart {
    pub fn prepare(&self, path: &Path, _force: bool) -> anyhow::Result<AtomicFile> {
        Err(disabled(path))
    }
}

pub enum Legend {
    Below,
    Beside,
}

pub struct Line;

impl Line {
    pub fn new(_name: &'static str, _points: Vec<(f64, f64)>) -> Line {
        Line
    }

    pub fn reference(_name: &'static str, _points: Vec<(f64, f64)>) -> Line {
        Line
    }

    pub fn strong(_name: &'static str, _points: Vec<(f64, f64)>) -> Line {
        Line
    }

    pub fn coloured(_name: String, _points: Vec<(f64, f64)>) -> Line {
        Line
    }

    pub fn with_points(self) -> Line {
        self
    }
}

pub struct Occupancy;

impl Occupancy {
    pub fn new(_title: String, _timeline: &Timeline, _end_ms: Option<f64>) -> Occupancy {
        Occupancy
    }

    pub fn prepare(&self, path: &Path, _force: bool) -> anyhow::Result<AtomicFile> {
        Err(disabled(path))
    }
}

pub struct PassTimeline;

impl PassTimeline {
    pub fn new(_title: String, _pass: &[Transfer], _report: &OverlapReport) -> PassTimeline {
        PassTimeline
    }

    pub fn write(&self, path: &Path, _force: bool) -> anyhow::Result<()> {
        Err(disabled(path))
    }
}
