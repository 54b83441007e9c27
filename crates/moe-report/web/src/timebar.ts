/** The time range of the selection: a bar with the density of records, a window, and its playback. */
import { onDrag, Surface } from "./canvas";
import type { Context } from "./context";
import type { Dataset } from "./dataset";
import { button, field, h, select } from "./dom";
import { count, time } from "./format";
import { CATEGORIES } from "./palette";
import type { Selection } from "./selection";

const BINS = 400;
const EDGE = 6;

type Grip = "start" | "end" | "move" | "new";

export class TimeBar {
  readonly element: HTMLElement;
  private surface: Surface;
  private selection: Selection;
  private density: Float32Array[] = [];
  private prompts: [number, number][][];
  private playing = false;
  private seconds = 20;
  private play: HTMLButtonElement;
  private text = h("output", { class: "time-text" });

  constructor(private context: Context) {
    this.selection = context.store.value;
    this.surface = new Surface("time-bar", {
      role: "slider", tabindex: "0", "aria-label": "Time window", "aria-valuemin": 0, "aria-valuemax": context.duration, "aria-valuenow": 0, "aria-valuetext": "all",
    }, () => this.draw());
    this.prompts = context.datasets.map((d) => promptRuns(d));
    this.listen();
    this.play = button("▶", () => this.toggle(), { "aria-label": "Play", title: "Play (space)", class: "play" });
    const windows: [string, string][] = [["", "all"], ["0.5", "50 %"], ["0.2", "20 %"], ["0.1", "10 %"], ["0.05", "5 %"], ["0.02", "2 %"], ["0.01", "1 %"], ["0.001", "0.1 %"]];
    const size = select("Window", windows, "", (value) => {
      if (value === "") return context.select({ time: null });
      const length = Math.max(1, Math.round(Number(value) * context.duration));
      const from = Math.min(this.selection.time?.[0] ?? 0, context.duration - length);
      context.select({ time: [Math.max(0, from), Math.max(0, from) + length] });
    });
    const speed = select("Duration of the playback", [["60", "60 s"], ["20", "20 s"], ["10", "10 s"], ["5", "5 s"]], "20", (value) => (this.seconds = Number(value)));
    this.element = h("section", { class: "timebar", "aria-label": "Time range" },
      this.play, field("window", size), field("playback", speed), this.surface.element, this.text);
  }

  /** Computes the density of the start times of an input. */
  setStarts(index: number, starts: Float64Array): void {
    const bins = new Float32Array(BINS);
    const scale = BINS / this.context.duration;
    for (const t of starts) bins[Math.min(BINS - 1, Math.floor(t * scale))]++;
    const max = bins.reduce((a, b) => Math.max(a, b), 1);
    this.density[index] = bins.map((b) => b / max);
    this.surface.redraw();
  }

  update(selection: Selection): void {
    this.selection = selection;
    const unit = this.context.datasets[0].input.time_unit;
    const text = selection.time ? `${time(selection.time[0], unit)} to ${time(selection.time[1], unit)}` : (unit === "step" ? `all: ${count(this.context.duration)} steps` : `all: ${time(this.context.duration, unit)}`);
    this.text.textContent = text;
    this.surface.canvas.setAttribute("aria-valuenow", String(selection.time?.[0] ?? 0));
    this.surface.canvas.setAttribute("aria-valuetext", text);
    this.surface.redraw();
  }

  /** Starts or stops the playback: the window moves from its position to the end. */
  toggle(): void {
    this.playing = !this.playing;
    this.play.textContent = this.playing ? "❚❚" : "▶";
    this.play.setAttribute("aria-label", this.playing ? "Pause" : "Play");
    if (!this.playing) return;
    const { duration } = this.context;
    const current = this.selection.time ?? [0, Math.max(1, Math.round(duration / 20))];
    const length = current[1] - current[0];
    let from = current[1] >= duration ? 0 : current[0];
    let last = performance.now();
    const step = (now: number) => {
      if (!this.playing) return;
      from += ((now - last) / 1000 / this.seconds) * duration;
      last = now;
      const end = from + length >= duration;
      if (end) from = duration - length;
      this.context.select({ time: [Math.round(from), Math.round(from + length)] });
      if (end) this.toggle();
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  private listen(): void {
    const { canvas } = this.surface;
    const { duration } = this.context;
    let grip: Grip = "new";
    let anchor = 0;
    let origin: [number, number] = [0, 0];
    onDrag(canvas, {
      start: (event) => {
        grip = this.gripAt(event);
        anchor = this.timeAt(event);
        origin = this.selection.time ?? [0, duration];
      },
      move: (_dx, _dy, event) => {
        const at = this.timeAt(event);
        const length = origin[1] - origin[0];
        let range: [number, number] = [Math.min(anchor, at), Math.max(anchor, at)];
        if (grip === "move") {
          const from = Math.max(0, Math.min(duration - length, origin[0] + at - anchor));
          range = [from, from + length];
        } else if (grip !== "new") {
          const fixed = grip === "start" ? origin[1] : origin[0];
          range = [Math.min(fixed, at), Math.max(fixed, at)];
        }
        this.context.select({ time: [Math.round(range[0]), Math.round(Math.max(range[0] + 1, range[1]))] });
      },
      click: (event) => {
        if (!this.selection.time) return;
        const length = this.selection.time[1] - this.selection.time[0];
        const from = Math.round(Math.max(0, Math.min(duration - length, this.timeAt(event) - length / 2)));
        this.context.select({ time: [from, from + length] });
      },
    });
    canvas.addEventListener("mousemove", (event) => {
      const grips = { start: "ew-resize", end: "ew-resize", move: "grab", new: "crosshair" };
      canvas.style.cursor = grips[this.gripAt(event)];
    });
    canvas.addEventListener("dblclick", () => this.context.select({ time: null }));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  private onKey(event: KeyboardEvent): void {
    const { duration } = this.context;
    const [from, to] = this.selection.time ?? [0, Math.round(duration / 20)];
    const length = to - from;
    const step = Math.max(1, Math.round(length / 4));
    const move = (d: number): [number, number] => {
      const start = Math.max(0, Math.min(duration - length, from + d));
      return [start, start + length];
    };
    let next: [number, number] | null;
    if (event.key === "ArrowRight") next = event.shiftKey ? [from, Math.min(duration, to + step)] : move(step);
    else if (event.key === "ArrowLeft") next = event.shiftKey ? [from, Math.max(from + 1, to - step)] : move(-step);
    else if (event.key === "PageDown") next = move(length);
    else if (event.key === "PageUp") next = move(-length);
    else if (event.key === "Home") next = move(-duration);
    else if (event.key === "End") next = move(duration);
    else if (event.key === "Delete") next = null;
    else return;
    event.preventDefault();
    this.context.select({ time: next });
  }

  private timeAt(event: MouseEvent): number {
    const [x] = this.surface.position(event);
    return Math.max(0, Math.min(1, x / this.surface.width)) * this.context.duration;
  }

  private gripAt(event: MouseEvent): Grip {
    const range = this.selection.time;
    if (!range) return "new";
    const [x] = this.surface.position(event);
    const [x0, x1] = range.map((t) => (t / this.context.duration) * this.surface.width);
    if (Math.abs(x - x0) < EDGE && Math.abs(x - x0) <= Math.abs(x - x1)) return "start";
    if (Math.abs(x - x1) < EDGE) return "end";
    return x > x0 && x < x1 ? "move" : "new";
  }

  private draw(): void {
    const { surface, selection, context } = this;
    const { context: c, width, height } = surface;
    const theme = context.theme();
    const rows = Math.max(1, context.datasets.length);
    const rowHeight = height / rows;
    this.density.forEach((bins, row) => {
      c.fillStyle = CATEGORIES[row];
      c.globalAlpha = 0.55;
      const bottom = (row + 1) * rowHeight - 1;
      bins.forEach((b, i) => {
        const bar = Math.sqrt(b) * (rowHeight - 3);
        c.fillRect((i / BINS) * width, bottom - bar, width / BINS + 0.5, bar);
      });
    });
    c.globalAlpha = 1;
    c.fillStyle = theme.accent;
    this.prompts.forEach((runs, row) => {
      for (const [from, to] of runs) c.fillRect((from / context.duration) * width, row * rowHeight, Math.max(1, ((to - from) / context.duration) * width), 3);
    });
    const { time: range, token } = selection;
    if (token !== null) {
      context.datasets.forEach((data, row) => {
        const at = data.input.tokens.start[token];
        if (at === undefined) return;
        c.fillStyle = theme.text;
        c.fillRect((at / context.duration) * width - 1, row * rowHeight, 2, rowHeight);
      });
    }
    if (!range) return;
    const [x0, x1] = range.map((t) => (t / context.duration) * width);
    c.fillStyle = theme.surface;
    c.globalAlpha = 0.65;
    c.fillRect(0, 0, x0, height);
    c.fillRect(x1, 0, width - x1, height);
    c.globalAlpha = 1;
    c.strokeStyle = theme.mark;
    c.lineWidth = 2;
    c.strokeRect(x0, 1, Math.max(2, x1 - x0), height - 2);
  }
}

/** Times of consecutive prompt tokens. */
function promptRuns({ input, tokenEnd }: Dataset): [number, number][] {
  const { start, phase } = input.tokens;
  const runs: [number, number][] = [];
  for (let i = 0; i < start.length; i++) {
    if (phase[i] !== 0) continue;
    const last = runs[runs.length - 1];
    if (last && start[i] <= last[1]) last[1] = Math.max(last[1], tokenEnd[i]);
    else runs.push([start[i], tokenEnd[i]]);
  }
  return runs;
}
