/** Draws the map of the model's files. */
import { lowerBound } from "../analysis";
import type { Surface } from "../canvas";
import type { Tensor } from "../data";
import { bytes, count } from "../format";
import { heat, type Theme } from "../palette";
import type { Selection } from "../selection";

export interface FileScene {
  theme: Theme;
  tensors: Tensor[];
  begin: Uint32Array;
  counts: Uint32Array;
  starts: Float64Array;
  sizes: Float64Array;
  tensorOf: Uint32Array;
  max: number;
  total: number;
  left: number;
  span: number;
  selection: Selection;
}

/** Heights in CSS pixels: the overview of the entire file, the labels of layers and tensors, the axis. */
export const PLOT = { overview: 30, layers: 20, labels: 34, axis: 22 };

/** Height of a range without accesses. */
const FLOOR = 10;

interface Area {
  top: number;
  bottom: number;
  left: number;
  span: number;
}

export function drawFile(surface: Surface, scene: FileScene): void {
  const { context: c, width, height } = surface;
  if (scene.total === 0) return;
  const { theme } = scene;
  c.font = "11px system-ui, sans-serif";
  c.textBaseline = "middle";
  drawElements(c, width, scene, { top: 4, bottom: PLOT.overview - 8, left: 0, span: scene.total }, false);
  const x0 = (scene.left / scene.total) * width;
  const w = Math.max(3, (scene.span / scene.total) * width);
  c.strokeStyle = theme.mark;
  c.lineWidth = 2;
  c.strokeRect(Math.max(1, x0), 2, Math.min(width - 2, w), PLOT.overview - 8);

  const top = PLOT.overview + PLOT.layers;
  const bottom = height - PLOT.axis - PLOT.labels;
  drawLayers(c, width, scene, PLOT.overview, bottom);
  drawElements(c, width, scene, { top: top + 14, bottom, left: scene.left, span: scene.span }, true);
  drawCounts(c, width, scene, top + 14, bottom);
  drawLabels(c, width, scene, bottom);
  drawSelected(c, width, scene, top + 14, bottom);
  drawAxis(c, width, scene, height - PLOT.axis);
}

/** Elements that are narrower than a pixel share it: the pixel has the color of the most accessed. */
function drawElements(c: CanvasRenderingContext2D, width: number, scene: FileScene, area: Area, tall: boolean): void {
  const { starts, sizes, counts, theme, max } = scene;
  const scale = width / area.span;
  const columns = new Int32Array(Math.ceil(width) + 1).fill(-1);
  const floor = tall ? FLOOR : area.bottom - area.top;
  const logMax = Math.log1p(max);
  const bar = (x: number, w: number, n: number) => {
    const value = n === 0 || max === 0 ? 0 : Math.log1p(n) / logMax;
    const h = n === 0 ? floor : tall ? floor + value * (area.bottom - area.top - floor) : floor;
    c.fillStyle = n === 0 ? theme.empty : heat(value);
    c.fillRect(x, area.bottom - h, w, h);
  };
  const first = Math.max(0, lowerBound(starts, area.left) - 1);
  const last = lowerBound(starts, area.left + area.span);
  fillGaps(c, Math.max(0, -area.left * scale), Math.min(width, (scene.total - area.left) * scale), area.bottom - floor, floor, theme);
  for (let i = first; i < last; i++) {
    const x = (starts[i] - area.left) * scale;
    const w = sizes[i] * scale;
    if (x + w < 0) continue;
    if (w >= 2) {
      const from = Math.max(-1, x);
      bar(from, Math.min(width + 1, x + w) - from - (w > 4 && tall ? 1 : 0), counts[i]);
    } else {
      const at = Math.floor(x);
      if (at >= 0 && at < columns.length && counts[i] > columns[at]) columns[at] = counts[i];
    }
  }
  columns.forEach((n, x) => {
    if (n >= 0) bar(x, 1, n);
  });
}

/** Hatching of bytes without a tensor; elements are drawn over it. */
function fillGaps(c: CanvasRenderingContext2D, from: number, to: number, top: number, height: number, theme: Theme): void {
  if (to <= from) return;
  c.save();
  c.beginPath();
  c.rect(from, top, to - from, height);
  c.clip();
  c.strokeStyle = theme.muted;
  c.lineWidth = 1;
  c.beginPath();
  for (let x = from - height - (from % 5); x < to; x += 5) {
    c.moveTo(x, top + height);
    c.lineTo(x + height, top);
  }
  c.stroke();
  c.restore();
}

/** Bands of the layers with their numbers. */
function drawLayers(c: CanvasRenderingContext2D, width: number, scene: FileScene, top: number, bottom: number): void {
  const { tensors, begin, starts, theme, left, span, selection } = scene;
  const scale = width / span;
  c.textAlign = "center";
  for (let i = 0; i < tensors.length; ) {
    let j = i;
    while (j < tensors.length && tensors[j].layer === tensors[i].layer && tensors[j].file === tensors[i].file) j++;
    const { layer } = tensors[i];
    const x = (starts[begin[i]] - left) * scale;
    const end = (starts[begin[j] - 1] + scene.sizes[begin[j] - 1] - left) * scale;
    i = j;
    if (end < 0 || x > width || layer < 0) continue;
    if (layer % 2 === 0) {
      c.fillStyle = theme.background;
      c.fillRect(x, top, end - x, bottom - top);
    }
    const from = Math.max(0, x);
    const to = Math.min(width, end);
    const text = to - from > 52 ? `layer ${layer}` : String(layer);
    if (to - from < 8 * text.length * 0.85) continue;
    c.fillStyle = layer === selection.layer ? theme.text : theme.muted;
    c.fillText(text, (from + to) / 2, top + PLOT.layers / 2);
  }
}

/** Names of tensors and numbers of experts, where they fit. */
function drawLabels(c: CanvasRenderingContext2D, width: number, scene: FileScene, top: number): void {
  const { tensors, begin, starts, sizes, theme, left, span } = scene;
  const scale = width / span;
  c.textAlign = "center";
  c.fillStyle = theme.muted;
  const first = scene.tensorOf[Math.max(0, lowerBound(starts, left) - 1)] ?? 0;
  for (let t = first; t < tensors.length; t++) {
    const x = (starts[begin[t]] - left) * scale;
    if (x > width) break;
    const from = Math.max(0, x);
    const to = Math.min(width, x + tensors[t].size * scale);
    const name = tensors[t].name.replace(/^blk\.\d+\./, "").replace(/\.weight$/, "");
    if (to - from > 24) {
      c.fillRect(from + 1, top + 20.5, to - from - 2, 1);
      if (to - from > c.measureText(name).width + 6) c.fillText(name, (from + to) / 2, top + 28);
    }
    const n = begin[t + 1] - begin[t];
    const w = sizes[begin[t]] * scale;
    if (n < 2 || w < 6) continue;
    const every = [1, 2, 4, 8, 16].find((s) => s * w >= 22) ?? 32;
    for (let e = 0; e < n; e += every) {
      const center = x + (e + 0.5) * w;
      if (center > 0 && center < width) c.fillText(String(e), center, top + 9);
    }
  }
}

/** Marks the selected expert in each tensor of its layer, and outlines the selected tensor. */
function drawSelected(c: CanvasRenderingContext2D, width: number, scene: FileScene, top: number, bottom: number): void {
  const { tensors, begin, starts, sizes, theme, left, span, selection } = scene;
  const scale = width / span;
  c.strokeStyle = theme.mark;
  c.fillStyle = theme.mark;
  c.lineWidth = 2;
  tensors.forEach((t, i) => {
    const x = (starts[begin[i]] - left) * scale;
    const w = t.size * scale;
    if (x > width || x + w < 0) return;
    if (t.name === selection.tensor) c.strokeRect(Math.max(-3, x - 1), top - 2, Math.min(width + 6, x + w) - Math.max(-3, x) + 2, bottom - top + 3);
    if (selection.expert === null || t.layer !== selection.layer || selection.expert >= t.n_expert) return;
    const at = begin[i] + selection.expert;
    const center = (starts[at] + sizes[at] / 2 - left) * scale;
    c.beginPath();
    c.moveTo(center, top - 3);
    c.lineTo(center - 5, top - 12);
    c.lineTo(center + 5, top - 12);
    c.fill();
  });
}

/** Lines at 1, 10, 100, … accesses. */
function drawCounts(c: CanvasRenderingContext2D, width: number, scene: FileScene, top: number, bottom: number): void {
  const { theme, max } = scene;
  c.textAlign = "left";
  for (let n = 1; n <= max; n *= 10) {
    const y = bottom - FLOOR - (Math.log1p(n) / Math.log1p(max)) * (bottom - top - FLOOR);
    c.fillStyle = theme.muted;
    c.globalAlpha = 0.5;
    c.fillRect(0, Math.round(y), width, 1);
    c.globalAlpha = 1;
    const text = count(n);
    c.fillStyle = theme.surface;
    c.fillRect(0, y - 7, c.measureText(text).width + 6, 14);
    c.fillStyle = theme.text;
    c.fillText(text, 3, y);
  }
}

function drawAxis(c: CanvasRenderingContext2D, width: number, scene: FileScene, top: number): void {
  const { theme, left, span, total } = scene;
  const scale = width / span;
  let step = 2 ** Math.ceil(Math.log2((span / width) * 90));
  if (!(step > 0)) step = 1;
  c.fillStyle = theme.muted;
  for (let at = Math.max(0, Math.ceil(left / step) * step); at <= Math.min(total, left + span); at += step) {
    const x = (at - left) * scale;
    c.fillRect(x, top, 1, 4);
    c.textAlign = x < 30 ? "left" : x > width - 40 ? "right" : "center";
    c.fillText(bytes(at), Math.max(1, x), top + 13);
  }
}
