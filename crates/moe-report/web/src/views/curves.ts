/** Charts of all inputs, in groups, and the timeline of each input. */
import type { Context, View } from "../context";
import type { Chart } from "../data";
import { h } from "../dom";
import type { Selection } from "../selection";
import { ChartBox } from "./chart";
import { Timeline } from "./timeline";

const GROUPS: [string, string][] = [
  ["coverage", "Coverage"], ["stability", "Stability"], ["cache", "Cache simulation"], ["lanes", "Lanes"], ["buffers", "Buffers"], ["speed", "Speed"], ["other", "Other"],
];

export function createCurves(context: Context): View {
  const { report, datasets } = context;
  const boxes: ChartBox[] = [];
  const timelines = datasets.filter((d) => d.input.tracks.length > 0).map((d) => new Timeline(context, d));
  const element = h("div", { class: "view curves scroll", tabindex: "0", role: "region", "aria-label": "Charts" });
  const add = (charts: Chart[], parent: HTMLElement) => {
    for (const chart of charts) {
      const box = new ChartBox(context, chart);
      boxes.push(box);
      parent.append(box.element);
    }
  };
  const known = new Set(GROUPS.map(([id]) => id));
  for (const [id, title] of GROUPS) {
    const charts = report.charts.filter((c) => c.group === id || (id === "other" && !known.has(c.group)));
    const lanes = id === "lanes" ? timelines : [];
    if (charts.length === 0 && lanes.length === 0) continue;
    element.append(h("h3", {}, title));
    add(charts.filter((c) => typeof c.input !== "number"), element.appendChild(h("div", { class: "chart-grid" })));
    const columns = h("div", { class: "chart-columns" });
    for (const data of datasets) {
      const column = h("div", { class: "chart-column", "data-input": data.index });
      if (datasets.length > 1) column.append(h("p", { class: "column-title" }, data.input.name));
      const grid = column.appendChild(h("div", { class: "chart-grid" }));
      add(charts.filter((c) => c.input === data.index), grid);
      for (const timeline of lanes) if (timeline.data === data) column.append(timeline.element);
      columns.append(column);
    }
    element.append(columns);
  }
  if (element.childElementCount === 0) element.append(h("p", { class: "muted" }, "The report contains no charts."));
  return {
    element,
    update(selection: Selection) {
      element.dataset.only = selection.input === null ? "" : String(selection.input);
      for (const box of boxes) box.update(selection);
      for (const timeline of timelines) timeline.update(selection);
    },
    destroy() {
      for (const box of boxes) box.destroy();
      for (const timeline of timelines) timeline.destroy();
    },
  };
}
