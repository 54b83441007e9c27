/** Colours that colour-blind readers can distinguish: cividis for amounts, Okabe and Ito's palette for categories. */

const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];

/** Cividis as 256 colours, `rgb(…)` and bytes. */
const rgb = new Uint8Array(256 * 3);
for (let i = 0; i < 256; i++) {
  const x = (i / 255) * (CIVIDIS.length - 1);
  const at = Math.min(CIVIDIS.length - 2, Math.floor(x));
  for (let c = 0; c < 3; c++) {
    const part = (hex: string) => parseInt(hex.slice(1 + 2 * c, 3 + 2 * c), 16);
    rgb[3 * i + c] = Math.round(part(CIVIDIS[at]) + (part(CIVIDIS[at + 1]) - part(CIVIDIS[at])) * (x - at));
  }
}

/** Bytes of the colour for a value from 0 to 1: `heat(0.3)[0..2]`. */
export function heatBytes(value: number): Uint8Array {
  const i = 3 * Math.max(0, Math.min(255, Math.round(255 * value)));
  return rgb.subarray(i, i + 3);
}

export function heat(value: number): string {
  const [r, g, b] = heatBytes(value);
  return `rgb(${r},${g},${b})`;
}

export function heatGradient(): string {
  return `linear-gradient(to right, ${CIVIDIS.join(", ")})`;
}

/** Okabe-Ito without black and yellow, which are hard to see on one of the backgrounds. */
export const CATEGORIES = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8c8c8c"];

const LANES: Record<string, string> = {
  cpu: "#8c8c8c",
  gpu_resident: "#0072b2",
  hot_cache: "#e69f00",
  post_fetched: "#009e73",
  post_fetch_miss: "#d55e00",
  cache_hit: "#56b4e9",
  cache_miss: "#cc79a7",
};

export function laneColor(lane: string): string {
  return LANES[lane] ?? "#8c8c8c";
}

const NODES: Record<string, string> = {
  input: "#56b4e9",
  attention: "#0072b2",
  ffn: "#e69f00",
  norm: "#009e73",
  output: "#d55e00",
  other: "#8c8c8c",
};

export const NODE_CATEGORIES = Object.keys(NODES);

export function nodeColor(category: string): string {
  return NODES[category] ?? NODES.other;
}

/** Colours of the theme that canvases use. The style sheet defines them. */
export interface Theme {
  text: string;
  muted: string;
  line: string;
  surface: string;
  background: string;
  empty: string;
  accent: string;
  mark: string;
}

export function readTheme(): Theme {
  const style = getComputedStyle(document.documentElement);
  const get = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return { text: get("text"), muted: get("muted"), line: get("line"), surface: get("surface"), background: get("background"), empty: get("empty"), accent: get("accent"), mark: get("mark") };
}
