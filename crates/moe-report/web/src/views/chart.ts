/** A chart with its title, its note and a table of its values. */
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Context } from "../context";
import type { Axis, Chart, Series } from "../data";
import { h } from "../dom";
import { bytes, number, time } from "../format";
import { CATEGORIES } from "../palette";
import type { Selection } from "../selection";

const HEIGHT = 240;
/** Dashes distinguish the series without color. */
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [14, 4]];

export class ChartBox {
  readonly element: HTMLElement;
  private place = h("div", { class: "plot" });
  private values = h("details", { class: "values" }, h("summary", {}, "Values"));
  private plot: uPlot | null = null;
  private observer: ResizeObserver;
  private selection: Selection;
  private theme = "";

  constructor(private context: Context, private chart: Chart) {
    this.selection = context.store.value;
    const { values } = this;
    values.addEventListener("toggle", () => {
      if (!values.open) return;
      if (values.childElementCount > 1) values.lastChild!.remove();
      values.append(valueTable(context, this.chart));
    });
    this.element = h("figure", { class: "chart", id: `chart-${chart.id}` },
      h("figcaption", {}, h("strong", {}, chart.title), chart.note ? h("span", { class: "muted" }, chart.note) : null), this.place, values);
    this.place.setAttribute("role", "img");
    this.place.setAttribute("aria-label", `${chart.title}: ${chart.y.label} by ${chart.x.label}, series ${chart.series.map((s) => s.name).join(", ")}. The values are in a table below.`);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.place);
  }

  /** Replaces the values. The series stay the same. */
  setSeries(series: Series[]): void {
    this.chart = { ...this.chart, series };
    this.plot?.setData(joined(series));
    if (this.values.open) this.values.lastChild!.replaceWith(valueTable(this.context, this.chart));
  }

  update(selection: Selection): void {
    this.selection = selection;
    const theme = JSON.stringify(this.context.theme());
    if (theme !== this.theme && this.plot) {
      this.plot.destroy();
      this.plot = null;
      this.resize();
    } else if (this.chart.x.scale === "time") this.plot?.redraw(false);
    this.theme = theme;
  }

  destroy(): void {
    this.observer.disconnect();
    this.plot?.destroy();
  }

  private resize(): void {
    const width = this.place.clientWidth;
    if (width === 0) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else this.plot = new uPlot(this.options(width), joined(this.chart.series), this.place);
  }

  private options(width: number): uPlot.Options {
    const { chart, context } = this;
    const theme = context.theme();
    const unit = context.datasets[chart.input ?? 0]?.input.time_unit ?? "ns";
    const isTime = chart.x.scale === "time";
    const axis = (a: Axis, size: number): uPlot.Axis => ({
      label: a.label, labelSize: 22, size, font: "11px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      stroke: theme.muted, grid: { stroke: theme.line, width: 1 }, ticks: { stroke: theme.line, width: 1 },
      values: (_, ticks) => ticks.map((v) => (v === null ? null : label(a, v, unit))),
      incrs: a.scale === "bytes" ? Array.from({ length: 50 }, (_, i) => 2 ** i) : undefined,
      space: a === chart.y ? 32 : a.scale === "time" ? 90 : 50,
    });
    const scale = (a: Axis): uPlot.Scale => ({
      time: false, distr: a.scale === "log" ? 3 : 1,
      range: (_u, low, high) => {
        const [from, to] = a.scale === "log" ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low ?? 0, high ?? 1, { min: { pad: 0 }, max: { pad: 0.05 } });
        return [a.min ?? from, a.max ?? to] as uPlot.Range.MinMax;
      },
    });
    const x = scale(chart.x);
    x.range = (_u, low, high) => [chart.x.min ?? low, chart.x.max ?? (high > low ? high : low + 1)];
    return {
      width, height: HEIGHT, scales: { x, y: scale(chart.y) }, axes: [axis(chart.x, 34), axis(chart.y, chart.y.scale === "bytes" ? 74 : 48)],
      cursor: { drag: { x: isTime, y: false, setScale: false }, sync: isTime ? { key: "time" } : undefined },
      select: { show: isTime, left: 0, top: 0, width: 0, height: 0 },
      legend: { live: true },
      series: [{ label: chart.x.label, value: (_, v) => (v === null ? "–" : label(chart.x, v, unit)) }, ...chart.series.map((s, i) => this.series(s, i, unit))],
      hooks: {
        setSelect: [(u) => {
          if (!isTime || u.select.width < 2) return;
          const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")].map((t) => Math.max(0, Math.round(t)));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          context.select({ time: [range[0], range[1]] });
        }],
        drawAxes: [(u) => this.drawRange(u, theme.accent)],
      },
    };
  }

  private series(s: Series, i: number, unit: "ns" | "step"): uPlot.Series {
    const color = s.dash ? this.context.theme().muted : CATEGORIES[i % CATEGORIES.length];
    const paths = s.style === "step" ? uPlot.paths.stepped!({ align: 1 }) : s.style === "bars" ? uPlot.paths.bars!({ size: [0.7, 60] }) : s.style === "points" ? () => null : undefined;
    return {
      label: s.name, stroke: color, width: 2, dash: s.dash ? [4, 4] : DASHES[i % DASHES.length], spanGaps: true, paths,
      fill: s.style === "bars" ? `${color}80` : undefined, points: { show: s.style === "points", size: 6 },
      value: (_, v) => (v === null || v === undefined ? "–" : label(this.chart.y, v, unit)),
    };
  }

  /** Shades the time range of the selection. */
  private drawRange(u: uPlot, color: string): void {
    if (this.chart.x.scale !== "time" || !this.selection.time) return;
    const [from, to] = this.selection.time.map((t) => Math.max(u.bbox.left, Math.min(u.bbox.left + u.bbox.width, u.valToPos(t, "x", true))));
    u.ctx.save();
    u.ctx.globalAlpha = 0.2;
    u.ctx.fillStyle = color;
    u.ctx.fillRect(from, u.bbox.top, Math.max(2, to - from), u.bbox.height);
    u.ctx.restore();
  }
}

function label(axis: Axis, value: number, unit: "ns" | "step"): string {
  if (axis.scale === "time") return time(Math.round(value), unit);
  return axis.scale === "bytes" ? bytes(Math.round(value)) : number(value);
}

/** Series with their own x values as one table. */
function joined(series: Series[]): uPlot.AlignedData {
  const tables = series.map((s): uPlot.AlignedData => [s.x, s.y]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

/** At most 40 rows of the values, evenly spaced. */
function valueTable(context: Context, chart: Chart): HTMLElement {
  const [xs, ...ys] = joined(chart.series);
  const unit = context.datasets[chart.input ?? 0]?.input.time_unit ?? "ns";
  const step = Math.max(1, Math.ceil(xs.length / 40));
  const body = h("tbody");
  for (let i = 0; i < xs.length; i += step) {
    body.append(h("tr", {}, h("th", { scope: "row" }, label(chart.x, xs[i], unit)), ...ys.map((y) => h("td", {}, typeof y[i] === "number" ? label(chart.y, y[i]!, unit) : "–"))));
  }
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values of ${chart.title}` }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, chart.x.label), ...chart.series.map((s) => h("th", { scope: "col" }, `${s.name}, ${chart.y.label}`)))), body));
}
