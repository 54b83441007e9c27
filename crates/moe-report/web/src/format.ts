/** Texts of numbers with units. */

const integers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** `1234567` → `1,234,567`. */
export function count(n: number): string {
  return integers.format(n);
}

/** A number with about three significant digits. */
export function number(n: number): string {
  if (n === 0) return "0";
  const a = Math.abs(n);
  if (a >= 100) return integers.format(n);
  return String(Number(n.toPrecision(3)));
}

/** The last two components of a path. */
export function shortName(path: string): string {
  return path.split(/[\\/]/).filter(Boolean).slice(-2).join("/");
}

export function percent(fraction: number): string {
  return `${number(100 * fraction)} %`;
}

/** Round values in a range, at most about `most` of them. */
export function ticks(from: number, to: number, most: number): number[] {
  const least = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-9)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= least) ?? power;
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.max(0, Math.floor(to / step) - first + 1) }, (_, i) => (first + i) * step);
}

/** Bytes with a binary unit. */
export function bytes(n: number): string {
  if (n < 0) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit++;
  }
  return `${unit === 0 ? n : n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0)} ${units[unit]}`;
}

/** A time or duration in nanoseconds, or a step. */
export function time(n: number, unit: "ns" | "step"): string {
  if (unit === "step") return `step ${count(n)}`;
  if (n < 0) return "unknown";
  if (n < 1e3) return `${n} ns`;
  if (n < 1e6) return `${(n / 1e3).toFixed(n < 1e4 ? 2 : 1)} µs`;
  if (n < 1e9) return `${(n / 1e6).toFixed(n < 1e7 ? 3 : 2)} ms`;
  return `${(n / 1e9).toFixed(3)} s`;
}

/** The text of a token on one line, in which spaces at its ends and line breaks are visible. */
export function visible(text: string | null | undefined, position: number): string {
  if (text === null || text === undefined) return `#${position}`;
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
}

/** The text of a token in running text: only line breaks, and tokens that consist of spaces, have symbols. */
export function running(text: string | null, position: number): string {
  return text !== null && text.trim() !== "" ? text.replaceAll("\n", "↵") : visible(text, position);
}
