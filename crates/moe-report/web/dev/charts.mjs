// Charts of a synthetic report, computed from its tables.

const line = (name, x, y, extra = {}) => ({ name, x, y, style: "line", ...extra });

export function makeCharts(data, input, { layers, experts, topK }) {
  const { routing } = data;
  const rows = routing.token.length;
  const counts = Array.from({ length: layers }, () => new Array(experts).fill(0));
  for (let i = 0; i < rows; i++) for (let k = 0; k < topK; k++) counts[routing.layer[i]][routing["e" + k][i]]++;
  const percent = Array.from({ length: 51 }, (_, i) => i * 2);
  const coverage = percent.map((p) => {
    let sum = 0;
    let all = 0;
    for (const c of counts) {
      const sorted = [...c].sort((a, b) => b - a);
      const n = Math.round((p / 100) * experts);
      for (let i = 0; i < n; i++) sum += sorted[i];
      for (const v of c) all += v;
    }
    return (100 * sum) / all;
  });
  const budgets = Array.from({ length: 16 }, (_, i) => (i + 1) * 128);
  const saturate = (scale) => budgets.map((b) => 100 * (1 - Math.exp(-b / scale)));
  const windows = Array.from({ length: 40 }, (_, i) => (i + 1) * 8);
  const times = Array.from({ length: 200 }, (_, i) => Math.round((i / 199) * data.duration));
  const hit = times.map((_, i) => 62 + 18 * (1 - Math.exp(-i / 30)) + 4 * Math.sin(i / 5));
  const chart = (id, group, title, x, y, series, note) => ({ id: `${id}-${input}`, group, input, title, note, x, y, series });
  const axis = (label, scale = "linear", extra = {}) => ({ label, scale, ...extra });
  const pct = (label) => axis(label, "linear", { min: 0, max: 100 });
  return [
    chart("coverage", "coverage", "Coverage of the most selected experts", pct("experts of a layer (%)"), pct("selections (%)"),
      [line("all layers", percent, coverage), line("uniform router", percent, percent, { dash: true })], "The curve is the mean of all layers."),
    chart("stability", "stability", "Coverage on held-out tokens", axis("size of the training split (tokens)"), pct("selections (%)"),
      [line("in-sample", windows, windows.map((w) => 66 + 20 * Math.exp(-w / 60))), line("out-of-sample", windows, windows.map((w) => 64 - 30 * Math.exp(-w / 60)))]),
    chart("cache", "cache", "Hit rate by cache size", axis("cache size (MiB)"), pct("hit rate (%)"),
      [line("belady", budgets, saturate(420)), line("lfu", budgets, saturate(640)), line("lru", budgets, saturate(760)), line("random", budgets, saturate(1100))]),
    chart("hit-rate", "lanes", "Hit rate over time", axis("time", "time"), pct("hit rate (%)"), [line("hot_cache", times, hit)]),
    chart("buffers", "buffers", "Allocated memory", axis("time", "time"), axis("memory", "bytes"), [
      { name: "CPU", x: times, y: times.map((_, i) => 4.1e8 + (i % 20) * 1e6), style: "step" },
      { name: "CUDA0", x: times, y: times.map((_, i) => (i < 10 ? 0 : 1.4e9)), style: "step" },
    ]),
  ];
}
