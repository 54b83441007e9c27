/** The screenshot of the README: `REPORT=report.html SCREENSHOT=out.png`, which `scripts/report-page.sh --screenshot` sets. */
import { readFileSync, writeFileSync } from "node:fs";
import { expect, test } from "@playwright/test";
// @ts-expect-error The encoder is plain JavaScript.
import { palettePng } from "../dev/palette-png.mjs";
import { open, out } from "./page";

/** The JSON block of a report. */
const DATA = /(?<=<script type="application\/json" id="report">).*?(?=<\/script>)/s;
const { REPORT, SCREENSHOT } = process.env;

test("the screenshot of the README", async ({ page }) => {
  test.skip(!REPORT || !SCREENSHOT, "only with REPORT and SCREENSHOT");
  // The data of the report with the built page: the program may contain an older one.
  const report = readFileSync(REPORT!, "utf8");
  const part = (pattern: RegExp) => (report.match(pattern) ?? []).join("\n");
  const built = readFileSync(new URL("../dist/report.html", import.meta.url), "utf8")
    .replace("<!--report:title-->", () => part(/(?<=<title>).*?(?=<\/title>)/))
    .replace("<!--report:json-->", () => part(DATA))
    .replace("<!--report:tables-->", () => part(/<script type="application\/vnd\.apache\.parquet".*?<\/script>/gs));
  writeFileSync(out("own.html"), built);
  await page.setViewportSize({ width: 1200, height: 760 });
  // With a time range, the experts of all tokens are shown, not only those of the selected one.
  const { inputs } = JSON.parse(report.match(DATA)![0]) as { inputs: { duration: number }[] };
  await open(page, "own.html", `view=tokens&below=experts&token=20&layer=3&expert=17&time=0-${inputs[0].duration}`);
  await page.waitForTimeout(1000);
  const png = (await page.screenshot()).toString("base64");
  const { width, height, rgba } = await page.evaluate(async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: bitmap.width, height: bitmap.height });
    const context = canvas.getContext("2d")!;
    context.drawImage(bitmap, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    let text = "";
    for (let i = 0; i < data.length; i += 8192) text += String.fromCharCode(...data.subarray(i, i + 8192));
    return { width: canvas.width, height: canvas.height, rgba: btoa(text) };
  }, png);
  const small: Buffer = palettePng(Buffer.from(rgba, "base64"), width, height, 64);
  expect(small.length).toBeLessThan(60_000);
  writeFileSync(SCREENSHOT!, small);
});
