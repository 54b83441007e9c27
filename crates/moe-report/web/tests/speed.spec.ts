/** Speed of reports with 100,000 and 1,000,000 records: `SPEED=out.txt`, which `scripts/report-page.sh --speed` sets. */
import { appendFileSync, statSync, writeFileSync } from "node:fs";
import { test, type Page } from "@playwright/test";
// @ts-expect-error The generator is plain JavaScript.
import { makeReport } from "../dev/sample.mjs";
import { go, open, out } from "./page";

const { SPEED } = process.env;
const FRAMES = 60;

/** Times between frames in ms, while `step` is called in each frame. */
function frames(page: Page, step: "scroll" | "scrub", duration = 0): Promise<number[]> {
  return page.evaluate(async ([kind, n, duration]) => {
    const grid = document.querySelector(".virtual");
    const times: number[] = [];
    let last = 0;
    for (let i = 0; i <= n; i++) {
      const now = await new Promise<number>((done) => requestAnimationFrame(done));
      if (i > 0) times.push(now - last);
      last = now;
      if (kind === "scroll") grid!.scrollTop = ((i + 1) / n) * (grid!.scrollHeight - grid!.clientHeight);
      else location.hash = `view=experts&layer=3&time=${Math.round((duration * i) / (2 * n))}-${Math.round((duration * i) / (2 * n) + duration / 10)}`;
    }
    return times;
  }, [step, FRAMES, duration] as const);
}

function quantile(times: number[], q: number): number {
  return [...times].sort((a, b) => a - b)[Math.min(times.length - 1, Math.floor(q * times.length))];
}

for (const [records, limit] of [[100_000, 1000], [1_000_000, 3000]]) {
  test(`speed with ${records} records`, async ({ page }) => {
    test.skip(!SPEED, "only with SPEED");
    const name = `speed-${records}.html`;
    writeFileSync(out(name), makeReport({ records }));
    await open(page, name, "view=trace");
    const times = await page.evaluate(() => {
      const paint = performance.getEntriesByName("first-contentful-paint")[0];
      return { paint: paint.startTime, ready: performance.now(), duration: (JSON.parse(document.getElementById("report")!.textContent!) as { inputs: { duration: number }[] }).inputs[0].duration };
    });
    // CPU time of the page's main thread: unlike the times of frames, it does not depend on the load of the machine.
    const session = await page.context().newCDPSession(page);
    await session.send("Performance.enable", { timeDomain: "threadTicks" });
    const cpu = async () => 1000 * (await session.send("Performance.getMetrics")).metrics.find((m) => m.name === "TaskDuration")!.value;
    const before = await cpu();
    const scroll = await frames(page, "scroll");
    const scrolled = await cpu();
    await go(page, "view=experts&layer=3");
    const started = await cpu();
    const scrub = await frames(page, "scrub", times.duration);
    const scrubbed = await cpu();
    const share = (t: number[]) => (100 * t.filter((ms) => ms <= 33.8).length) / t.length;
    const line = (what: string, t: number[], cpuTime: number) => `${what}: median ${quantile(t, 0.5).toFixed(1)} ms, 95 % quantile ${quantile(t, 0.95).toFixed(1)} ms, ${share(t).toFixed(1)} % of ${t.length} frames within two refreshes at 60 Hz; CPU time per frame ${(cpuTime / t.length).toFixed(1)} ms`;
    appendFileSync(SPEED!, [
      `${records.toLocaleString("en-US")} records, ${(statSync(out(name)).size / 1e6).toFixed(1)} MB`,
      `  first paint: ${times.paint.toFixed(0)} ms (limit ${limit} ms); all tables decoded within ${times.ready.toFixed(0)} ms`,
      `  ${line("frames while scrolling the trace", scroll, scrolled - before)}`,
      `  ${line("frames while moving a time range over the experts", scrub, scrubbed - started)}`, "",
    ].join("\n"));
  });
}
