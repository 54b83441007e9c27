/** Spans of the lanes and copies over time: a row for each track. */
import { lowerBound } from "../analysis";
import { onDrag, Surface, tooltip } from "../canvas";
import type { Context } from "../context";
import type { Dataset } from "../dataset";
import { button, h } from "../dom";
import { bytes, ticks, time } from "../format";
import { CATEGORIES } from "../palette";
import type { Selection } from "../selection";

const ROW = 30;
const AXIS = 22;
const LEFT = 150;

export class Timeline {
  readonly element: HTMLElement;
  private surface: Surface;
  private selection: Selection;
  private from = 0;
  private to: number;
  private longest = 0;

  constructor(private context: Context, readonly data: Dataset) {
    this.selection = context.store.value;
    this.to = Math.max(1, data.input.duration);
    const { tracks } = data.input;
    this.surface = new Surface("timeline", { role: "img", "aria-label": `Timeline of ${data.input.name}: ${tracks.map((t) => t.name).join(", ")}` }, () => this.draw());
    this.surface.element.style.height = `${tracks.length * ROW + AXIS}px`;
    const { canvas } = this.surface;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      this.zoom(Math.exp((event.deltaY || event.deltaX) / 300), this.timeAt(event));
    }, { passive: false });
    let start = 0;
    onDrag(canvas, {
      start: (event) => (start = this.timeAt(event)),
      move: (_dx, _dy, event) => {
        const end = this.timeAt(event);
        context.select({ time: [Math.round(Math.min(start, end)), Math.round(Math.max(start, end))] });
      },
      click: (event) => {
        const i = this.spanAt(event);
        const spans = this.data.spans;
        if (i >= 0) context.select({ layer: spans!.layer[i] < 0 ? null : spans!.layer[i], token: spans!.token[i] < 0 ? null : spans!.token[i] });
      },
    });
    canvas.addEventListener("mousemove", (event) => tooltip(this.describe(this.spanAt(event)), event));
    canvas.addEventListener("mouseleave", () => tooltip(""));
    this.element = h("figure", { class: "chart timeline-box" },
      h("figcaption", {}, h("strong", {}, `Lanes and copies of ${data.input.name}`), h("span", { class: "muted" }, "Drag to select a time range, Ctrl + wheel to zoom.")),
      h("div", { class: "toolbar" }, h("span", { class: "group" },
        button("−", () => this.zoom(2), { "aria-label": "Zoom out of the timeline" }), button("+", () => this.zoom(0.5), { "aria-label": "Zoom into the timeline" }),
        button("Fit", () => this.setRange(0, data.input.duration)), button("To selection", () => this.toSelection()))),
      this.surface.element);
  }

  update(selection: Selection): void {
    this.selection = selection;
    if (this.longest === 0 && this.data.spans) for (const d of this.data.spans.duration) if (d > this.longest) this.longest = d;
    this.surface.redraw();
  }

  destroy(): void {
    this.surface.destroy();
  }

  private setRange(from: number, to: number): void {
    const length = Math.max(100, Math.min(this.data.input.duration, to - from));
    this.from = Math.max(0, Math.min(this.data.input.duration - length, from));
    this.to = this.from + length;
    this.surface.redraw();
  }

  private zoom(factor: number, around = (this.from + this.to) / 2): void {
    const length = Math.max(100, Math.min(this.data.input.duration, (this.to - this.from) * factor));
    const part = (around - this.from) / (this.to - this.from);
    this.setRange(around - part * length, around - part * length + length);
  }

  private toSelection(): void {
    const { time: range, token } = this.selection;
    const { start } = this.data.input.tokens;
    if (range) this.setRange(range[0], range[1]);
    else if (token !== null && token < start.length) this.setRange(start[token], this.data.tokenEnd[token]);
  }

  private get scale(): number {
    return Math.max(1, this.surface.width - LEFT - 8) / (this.to - this.from);
  }

  private timeAt(event: MouseEvent): number {
    const [x] = this.surface.position(event);
    return Math.max(0, Math.min(this.data.input.duration, this.from + (x - LEFT) / this.scale));
  }

  private spanAt(event: MouseEvent): number {
    const { spans } = this.data;
    const [x, y] = this.surface.position(event);
    const track = Math.floor(y / ROW);
    if (!spans || x < LEFT || track >= this.data.input.tracks.length) return -1;
    const at = this.timeAt(event);
    const slack = 2 / this.scale;
    for (let i = lowerBound(spans.start, at + slack) - 1; i >= 0 && spans.start[i] + this.longest >= at - slack; i--) {
      if (spans.track[i] === track && spans.start[i] + spans.duration[i] >= at - slack) return i;
    }
    return -1;
  }

  private describe(i: number): string {
    const { spans, input } = this.data;
    if (i < 0 || !spans) return "";
    const parts = [input.tracks[spans.track[i]].name, `layer ${spans.layer[i]}`, `token ${spans.token[i]}`, `${time(spans.start[i], "ns")} + ${time(spans.duration[i], "ns")}`];
    if (spans.bytes[i] >= 0) parts.push(bytes(spans.bytes[i]), `${(spans.bytes[i] / Math.max(1, spans.duration[i])).toFixed(1)} GB/s`);
    return parts.join(" · ");
  }

  private draw(): void {
    const { surface, data, from, to, scale, selection } = this;
    const { context: c, width } = surface;
    const { spans, input } = data;
    const theme = this.context.theme();
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    input.tracks.forEach((track, t) => {
      c.fillStyle = theme.text;
      c.textAlign = "left";
      c.fillText(track.name, 4, t * ROW + ROW / 2, LEFT - 10);
      c.fillStyle = theme.empty;
      c.fillRect(LEFT, t * ROW + 4, width - LEFT - 8, ROW - 8);
    });
    if (spans) this.drawSpans(width);
    c.strokeStyle = theme.mark;
    c.lineWidth = 2;
    if (selection.time) {
      const x0 = Math.max(LEFT, LEFT + (selection.time[0] - from) * scale);
      const x1 = Math.min(width - 8, LEFT + (selection.time[1] - from) * scale);
      if (x1 >= x0) c.strokeRect(x0, 1, Math.max(2, x1 - x0), input.tracks.length * ROW - 2);
    }
    c.fillStyle = theme.muted;
    c.textAlign = "center";
    for (const at of ticks(from, to, (width - LEFT) / 110)) {
      const x = LEFT + (at - from) * scale;
      c.fillRect(x, input.tracks.length * ROW - 2, 1, 4);
      if (x < width - 40) c.fillText(time(Math.round(at), input.time_unit), x, input.tracks.length * ROW + AXIS / 2);
    }
  }

  /** Spans that are narrower than a pixel are summed: the opacity of the pixel is their share of the time. */
  private drawSpans(width: number): void {
    const { data, from, to, scale, selection, surface } = this;
    const { context: c } = surface;
    const spans = data.spans!;
    const { tracks } = data.input;
    const right = width - 8;
    const busy = tracks.map(() => new Float32Array(Math.ceil(right) + 1));
    const first = lowerBound(spans.start, from - this.longest);
    const last = lowerBound(spans.start, to);
    for (let i = first; i < last; i++) {
      const t = spans.track[i];
      const x = LEFT + (spans.start[i] - from) * scale;
      const w = spans.duration[i] * scale;
      if (x + w < LEFT) continue;
      if (w < 1.5) {
        busy[t][Math.max(LEFT, Math.floor(x))] += w;
        continue;
      }
      const other = (selection.layer !== null && spans.layer[i] !== selection.layer) || (selection.token !== null && spans.token[i] !== selection.token);
      c.globalAlpha = other ? 0.45 : 1;
      c.fillStyle = CATEGORIES[t % CATEGORIES.length];
      const x0 = Math.max(LEFT, x);
      c.fillRect(x0, t * ROW + 5, Math.min(right, x + w) - x0, ROW - 10);
    }
    busy.forEach((column, t) => {
      c.fillStyle = CATEGORIES[t % CATEGORIES.length];
      for (let x = LEFT; x < right; x++) {
        if (column[x] <= 0) continue;
        c.globalAlpha = Math.min(1, 0.25 + 0.75 * column[x]);
        c.fillRect(x, t * ROW + 5, 1, ROW - 10);
      }
    });
    c.globalAlpha = 1;
  }
}
