//! The timeline of a forward pass under Post-Fetch: CPU, PCIe and GPU, and the hidden fraction of each layer's transfers.

use moe_analysis::overlap::{self, OverlapReport};
use moe_trace::transfers::{Span, Transfer};

use super::{Axis, Colour, Figure, Key, LineStyle, Mark, Panel, Sample, Ticks, colour};

const WIDTH: u32 = 940;
const LANES_HEIGHT: u32 = 124;
const BARS_HEIGHT: u32 = 130;
/// Number of layers in the magnified panel. A pass with fewer than twice as many layers has no such panel.
const N_MAGNIFIED: usize = 4;

/// Names and colours of the bars.
const GATE_UP: (&str, Colour) = ("gate and up on the CPU", colour::SLATE);
const HIDDEN: (&str, Colour) = ("H2D copy, hidden", colour::ORANGE);
const EXPOSED: (&str, Colour) = ("H2D copy, exposed", colour::RED);
const DOWN: (&str, Colour) = ("down on the GPU", colour::PURPLE);
const HIDEABLE: LineStyle = LineStyle {
    colour: Colour(40, 40, 48),
    width: 3,
    marker: None,
};

/// The lanes from bottom to top, and the layer numbers above them.
const LANES: [&str; 3] = ["GPU", "PCIe", "CPU"];
const GPU: f64 = 0.0;
const PCIE: f64 = 1.0;
const CPU: f64 = 2.0;
const LAYER_NUMBERS: f64 = 3.3;
const TOP: f64 = 3.6;

/// Returns the plot of `pass`, with the hidden fractions of all layers in `report`. `name` is the start of the subtitle.
pub fn pass_timeline(name: &str, pass: &[Transfer], report: &OverlapReport) -> Figure {
    let mut panels = vec![lanes("entire pass, with layer numbers", pass)];
    if let Some(layers) = magnified(pass) {
        panels.push(lanes("four layers in the middle, magnified", layers));
    }
    panels.push(bars(report));
    let areas = [GATE_UP, HIDDEN, EXPOSED, DOWN];
    let names = areas.map(|(name, colour)| (name.to_owned(), Sample::Area(colour)));
    let hideable = ("hideable (upper bound)".to_owned(), Sample::Line(HIDEABLE));
    Figure {
        title: "Timeline of a forward pass with Post-Fetch".into(),
        subtitle: format!("{name}{}", describe(pass)),
        panels,
        key: Key::Legend(names.into_iter().chain([hideable]).collect()),
    }
}

fn describe(pass: &[Transfer]) -> String {
    let length = overlap::bounds(pass).map_or(0, Span::ns);
    pass.first().map_or(String::new(), |first| {
        format!(
            ": {} of sequence {} at position {} in {:.3} ms",
            match first.n_tokens {
                1 => "1 token".into(),
                n => format!("{n} tokens"),
            },
            first.sequence_id,
            first.token_id,
            length as f64 * 1e-6
        )
    })
}

/// Returns the layers in the middle of the pass, if it has many layers.
fn magnified(pass: &[Transfer]) -> Option<&[Transfer]> {
    let first = (pass.len() / 2).checked_sub(N_MAGNIFIED / 2)?;
    let is_long = pass.len() >= 2 * N_MAGNIFIED;
    pass.get(first..first + N_MAGNIFIED).filter(|_| is_long)
}

/// Returns the panel with the three lanes of some layers of a pass.
fn lanes(title: &str, layers: &[Transfer]) -> Panel {
    let bounds = overlap::bounds(layers);
    let start_ns = bounds.map_or(0, |bounds| bounds.start_ns);
    let length_us = bounds.map_or(0, Span::ns).max(1) as f64 * 1e-3;
    let (unit_us, unit) = if length_us >= 10_000.0 {
        (1000.0, "ms")
    } else {
        (1.0, "µs")
    };
    let time = |ns: u64| ns.saturating_sub(start_ns) as f64 * 1e-3 / unit_us;
    let end = length_us / unit_us;
    let mut marks = Vec::new();
    for layer in layers {
        let mut bar = |lane: f64, span: Span, (_, colour): (&str, Colour)| {
            let (from, to) = (time(span.start_ns), time(span.end_ns));
            marks.push(Mark::area([(from, lane + 0.1), (to, lane + 0.9)], colour));
        };
        let window = layer.window;
        bar(CPU, window, GATE_UP);
        if let Some(transfer) = layer.transfer {
            bar(PCIE, transfer, EXPOSED);
            let hidden = Span {
                start_ns: transfer.start_ns.max(window.start_ns),
                end_ns: transfer.end_ns.min(window.end_ns),
            };
            if hidden.start_ns < hidden.end_ns {
                bar(PCIE, hidden, HIDDEN);
            }
        }
        if let Some(product) = layer.product {
            bar(GPU, product, DOWN);
        }
    }
    // Layer numbers above the start of gate and up. Numbers that would overlap are omitted.
    let pixel = end / f64::from(WIDTH);
    let mut free = 0.0;
    for layer in layers {
        let text = layer.layer_id.to_string();
        let (x, half) = (
            time(layer.window.start_ns),
            pixel * (4 * text.len() + 4) as f64,
        );
        if x >= free && x <= end {
            free = x + 2.0 * half;
            marks.push(Mark::Text {
                at: (x.max(half), LAYER_NUMBERS),
                text,
            });
        }
    }
    let names = [GPU, PCIE, CPU].map(|lane| lane + 0.5).into_iter();
    let names = names.zip(LANES.map(str::to_owned)).collect();
    Panel {
        title: title.into(),
        size: (WIDTH, LANES_HEIGHT),
        x: Axis::numbers(format!("time ({unit})"), 0.0, end),
        y: Axis {
            ticks: Ticks::Names(names),
            ..Axis::numbers("", 0.0, TOP)
        },
        marks,
    }
}

/// Returns the panel with the hidden fraction of each layer as a bar, and the hideable fraction as a line.
fn bars(report: &OverlapReport) -> Panel {
    let mut marks = Vec::new();
    for (place, figures) in report.layers.values().enumerate() {
        let x = place as f64;
        let percent = |share: f64| 100.0 * share.clamp(0.0, 1.0);
        if let Some(hidden) = figures.hidden_share().map(percent) {
            let corners = [(x - 0.35, 0.0), (x + 0.35, hidden)];
            marks.push(Mark::area(corners, HIDDEN.1));
        }
        if let Some(hideable) = figures.hideable_share().map(percent) {
            marks.push(Mark::Line {
                points: vec![(x - 0.35, hideable), (x + 0.35, hideable)],
                style: HIDEABLE,
            });
        }
    }
    let layers = report.layers.keys().map(|layer| layer.0.into());
    Panel {
        title: "hidden fraction of transfer time by layer, over all passes of the phase".into(),
        size: (WIDTH, BARS_HEIGHT),
        x: Axis::numbered("layer", layers.collect()),
        y: Axis::numbers("hidden (%)", 0.0, 100.0),
        marks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_analysis::overlap::MemoryTraffic;
    use moe_trace::{LayerId, Phase, TokenId};

    fn pass(n_layer: u16, clock: u64) -> Vec<Transfer> {
        let span = |start_ns, length| Span {
            start_ns,
            end_ns: start_ns + length,
        };
        let run = |layer_id: u16| {
            let start = clock + u64::from(layer_id) * 230_000;
            let length = 60_000 + 9_000 * u64::from(layer_id % 12);
            Transfer {
                sequence_id: 0,
                token_id: TokenId(12),
                phase: Phase::Generate,
                layer_id: LayerId(layer_id),
                n_tokens: 1,
                n_experts: 8,
                n_fetched: 8,
                bytes: 4 << 20,
                transfer: (layer_id % 7 != 5).then(|| span(start - 5_000, length)),
                window: span(start, 110_000),
                product: (layer_id % 7 != 5)
                    .then(|| span(start + length.max(110_000) + 2_000, 15_000)),
            }
        };
        (0..n_layer).map(run).collect()
    }

    #[test]
    fn draws_all_bars_of_passes_of_any_length() {
        let mut longest = pass(1, 5_000);
        longest[0].window.end_ns = u64::MAX;
        let mut empty = pass(1, 5_000);
        empty[0].transfer = None;
        empty[0].product = None;
        empty[0].window = Span {
            start_ns: 7,
            end_ns: 7,
        };
        let passes = [
            pass(1, 5_000),
            pass(7, 5_000),
            pass(48, 1_800_000_000_000_000_000),
            longest,
            empty,
        ];
        for pass in &passes {
            let report = overlap::report(pass, Phase::Generate, &MemoryTraffic::default()).unwrap();
            let figure = pass_timeline("run, pass 0 (of 0 to 0)", pass, &report);
            let is_magnified = pass.len() >= 2 * N_MAGNIFIED;
            assert_eq!(figure.panels.len(), if is_magnified { 3 } else { 2 });
            let count = |panel: &Panel, wanted: Colour| {
                let is_it =
                    |mark: &&Mark| matches!(mark, Mark::Area { colour, .. } if *colour == wanted);
                panel.marks.iter().filter(is_it).count()
            };
            let lanes = &figure.panels[0];
            let transfers = pass.iter().filter(|run| run.transfer.is_some()).count();
            assert_eq!(count(lanes, GATE_UP.1), pass.len());
            assert_eq!(count(lanes, EXPOSED.1), transfers);
            assert_eq!(count(lanes, DOWN.1), transfers);
        }
    }

    #[test]
    fn times_are_relative_to_the_first_span() {
        let panel = lanes("", &pass(2, 1_800_000_000_000_000_000));
        let Mark::Area { corners, .. } = &panel.marks[0] else {
            panic!("an area");
        };
        // The first window starts 5 µs after the first transfer, and takes 110 µs.
        assert_eq!(*corners, [(5.0, CPU + 0.1), (115.0, CPU + 0.9)]);
        assert_eq!(panel.x.label, "time (µs)");
    }
}
