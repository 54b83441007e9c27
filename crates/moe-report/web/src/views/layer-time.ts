/** Experts × time of the selected layer: a column for each time span, a row for each expert. */
import { Surface, onDrag, tooltip } from "../canvas";
import type { Context } from "../context";
import type { Dataset } from "../dataset";
import { h } from "../dom";
import { count, time } from "../format";
import { heatBytes } from "../palette";
import type { Selection } from "../selection";

const LEFT = 44;
const BINS = 240;

export class LayerTime {
  readonly element: HTMLElement;
  private surface: Surface;
  private title = h("h3");
  private texture = document.createElement("canvas");
  private counts = new Uint32Array(0);
  private experts = 0;
  private key = "";
  private selection: Selection;

  constructor(private context: Context, private data: Dataset) {
    this.selection = context.store.value;
    this.surface = new Surface("layer-time", { role: "img", "aria-label": "Selections by expert and time of the selected layer" }, () => this.draw());
    this.element = h("section", { class: "layer-time-box" }, this.title, this.surface.element);
    const { canvas } = this.surface;
    let from = 0;
    onDrag(canvas, {
      start: (event) => (from = this.timeAt(event)),
      move: (_dx, _dy, event) => {
        const to = this.timeAt(event);
        context.select({ time: [Math.min(from, to), Math.max(from, to)] });
      },
      click: (event) => {
        const expert = this.expertAt(event);
        if (expert >= 0) context.select({ layer: this.selection.layer, expert });
      },
    });
    canvas.addEventListener("mousemove", (event) => {
      const expert = this.expertAt(event);
      const bin = Math.floor((BINS * this.timeAt(event)) / this.data.input.duration);
      const c = this.counts[bin * this.experts + expert];
      tooltip(expert < 0 || c === undefined ? "" : `expert ${expert}, ${time(this.timeAt(event), data.input.time_unit)}: ${count(c)} selections`, event);
    });
    canvas.addEventListener("mouseleave", () => tooltip(""));
  }

  update(selection: Selection): void {
    this.selection = selection;
    const layer = this.data.input.layers.find((l) => l.index === selection.layer && l.n_expert > 0);
    this.element.hidden = !layer || !this.data.routing;
    if (!layer || !this.data.routing) return;
    const key = String(layer.index);
    if (key !== this.key) {
      this.key = key;
      this.experts = layer.n_expert;
      this.title.textContent = `Layer ${layer.index} over time (drag to select a time range)`;
      this.compute(layer.index);
    }
    this.surface.redraw();
  }

  destroy(): void {
    this.surface.destroy();
  }

  private compute(layer: number): void {
    const { routing, input } = this.data;
    const n = this.experts;
    this.counts = new Uint32Array(BINS * n);
    const scale = BINS / Math.max(1, input.duration);
    for (let i = 0; i < routing!.rows; i++) {
      if (routing!.layer[i] !== layer) continue;
      const bin = Math.min(BINS - 1, Math.floor(routing!.start[i] * scale));
      for (const column of routing!.experts) if (column[i] >= 0 && column[i] < n) this.counts[bin * n + column[i]]++;
    }
    let max = 0;
    for (const c of this.counts) if (c > max) max = c;
    this.texture.width = BINS;
    this.texture.height = n;
    const context = this.texture.getContext("2d")!;
    const image = context.createImageData(BINS, n);
    for (let x = 0; x < BINS; x++) {
      for (let y = 0; y < n; y++) {
        const c = this.counts[x * n + y];
        if (c === 0) continue;
        image.data.set(heatBytes(Math.sqrt(c / max)), 4 * (y * BINS + x));
        image.data[4 * (y * BINS + x) + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
  }

  private draw(): void {
    const { surface, selection, experts } = this;
    const { context: c, width, height } = surface;
    const theme = this.context.theme();
    const w = width - LEFT - 8;
    c.fillStyle = theme.empty;
    c.fillRect(LEFT, 0, w, height - 4);
    c.imageSmoothingEnabled = false;
    c.drawImage(this.texture, LEFT, 0, w, height - 4);
    const rowHeight = (height - 4) / experts;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "right";
    c.fillStyle = theme.muted;
    const every = [1, 2, 4, 8, 16, 32, 64].find((s) => s * rowHeight >= 13) ?? 128;
    for (let e = 0; e < experts; e += every) c.fillText(String(e), LEFT - 6, Math.max(6, (e + 0.5) * rowHeight));
    c.strokeStyle = theme.mark;
    c.lineWidth = 2;
    if (selection.expert !== null && selection.expert < experts) c.strokeRect(LEFT - 1, selection.expert * rowHeight - 1, w + 2, rowHeight + 2);
    if (selection.time) {
      const x = (t: number) => LEFT + (w * t) / Math.max(1, this.data.input.duration);
      c.strokeRect(x(selection.time[0]), 1, Math.max(2, x(selection.time[1]) - x(selection.time[0])), height - 6);
    }
  }

  private timeAt(event: MouseEvent): number {
    const [x] = this.surface.position(event);
    const part = (x - LEFT) / Math.max(1, this.surface.width - LEFT - 8);
    return Math.round(Math.max(0, Math.min(1, part)) * this.data.input.duration);
  }

  private expertAt(event: MouseEvent): number {
    const [x, y] = this.surface.position(event);
    const expert = Math.floor((y * this.experts) / Math.max(1, this.surface.height - 4));
    return x < LEFT || expert < 0 || expert >= this.experts ? -1 : expert;
  }
}
