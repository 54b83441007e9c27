/** One selection drives all views. */
import { expect, test } from "@playwright/test";
// @ts-expect-error The generator is plain JavaScript.
import { makeModel } from "../dev/model.mjs";
// @ts-expect-error The generator is plain JavaScript.
import { makeTables } from "../dev/tables.mjs";
import { go, expectKey, open, selected } from "./page";

const SHAPE = { layers: 24, experts: 64, topK: 4 };
const data = makeTables(makeModel(SHAPE), { rows: 20_000, ...SHAPE, prompt: 12, seed: 7, postFetch: false });
const { routing, records } = data;
const experts = [0, 1, 2, 3].map((k) => routing[`e${k}`] as number[]);

/** Rows of the routing in which a layer selects an expert. */
function uses(layer: number, expert: number): number[] {
  return routing.layer.flatMap((l: number, i: number) => (l === layer && experts.some((e) => e[i] === expert) ? [i] : []));
}

function popular(layer: number): number {
  return Array.from({ length: 64 }, (_, e) => e).sort((a, b) => uses(layer, b).length - uses(layer, a).length)[0];
}

test("an expert is the same in all views", async ({ page }) => {
  const expert = popular(5);
  const rows = uses(5, expert);
  const tokens = new Set(rows.map((r) => routing.token[r]));
  const recordsOfExpert = records.route.filter((r: number, i: number) => r >= 0 && records.layer[i] === 5 && rows.includes(r)).length;
  await open(page, "one.html", `view=experts&layer=5&expert=${expert}`);
  const facts = page.locator(".facts");
  await expect(facts).toContainText(`Expert ${expert} of layer 5`);
  await expect(facts.locator("section").first()).toContainText(`selections${rows.length}`);
  await page.getByRole("tab", { name: "Tokens" }).click();
  await expect(page.locator(".token.uses")).toHaveCount(tokens.size);
  await page.getByRole("tab", { name: "Trace" }).click();
  await expect(page.locator(".trace .toolbar")).toContainText(`${recordsOfExpert} highlighted`);
  await page.getByLabel("Only the selection").check();
  await expect(page.locator(".trace .toolbar")).toContainText(`${recordsOfExpert} of 20,000 records`);
  await expect(page.locator(".virtual .chip.selected").first()).toHaveText(String(expert));
  await page.getByRole("tab", { name: "Graph" }).click();
  await expect(page.getByLabel("Layer", { exact: true })).toHaveValue("5");
  await page.getByRole("tab", { name: "File" }).click();
  await expect(page.locator(".file .toolbar")).toContainText("layer 5:");
});

test("a click in the matrix selects a layer and an expert", async ({ page }) => {
  await open(page, "one.html", "view=experts");
  const matrix = page.locator(".matrix canvas");
  const box = (await matrix.boundingBox())!;
  const cell = (box.width - 52) / 64;
  await matrix.click({ position: { x: 44 + 10.5 * cell, y: 30 } });
  await expectKey(page, "layer", "0");
  await expectKey(page, "expert", "10");
  await expect(page.locator("#selected-expert")).toHaveValue("10");
});

test("a click on a token shows its experts in every layer", async ({ page }) => {
  await open(page, "one.html", "view=tokens");
  await page.locator("#t0-30").click();
  await expectKey(page, "token", "30");
  await expect(page.locator(".expert-table tbody tr")).toHaveCount(24);
  const row = routing.token.findIndex((t: number, i: number) => t === 30 && routing.layer[i] === 7);
  await expect(page.locator(".expert-table tbody tr").nth(7).locator("button")).toHaveText(experts.map((e) => String(e[row])));
  await page.locator(".expert-table tbody tr").nth(7).locator("button").first().click();
  await expectKey(page, "layer", "7");
  await expectKey(page, "expert", String(experts[0][row]));
  await go(page, "view=file&token=30");
  const touched = new Set(records.token.flatMap((t: number, i: number) => {
    if (t !== 30 || records.tensor[i] < 0) return [];
    const r = records.route[i];
    return r < 0 ? [`${records.tensor[i]}`] : experts.map((e) => `${records.tensor[i]}.${e[r]}`);
  }));
  await expect(page.locator(".file .toolbar")).toContainText(`${touched.size} of 4,779 ranges`);
});

test("a record selects its token, layer, tensor and node", async ({ page }) => {
  await open(page, "one.html", "view=trace");
  const index = records.op.findIndex((_: number, i: number) => i > 5000 && records.route[i] >= 0);
  await page.getByRole("grid").focus();
  await go(page, `view=trace&record=0.${index}`);
  await page.locator('.row[aria-selected="true"]').click();
  await expectKey(page, "token", String(records.token[index]));
  await expectKey(page, "layer", String(records.layer[index]));
  await expectKey(page, "name", data.names[records.name[index]]);
  await expect(page.locator(".facts")).toContainText("Record");
  await page.getByRole("tab", { name: "Tokens" }).click();
  await expect(page.locator('.token[aria-selected="true"]')).toHaveId(`t0-${records.token[index]}`);
});

test("a time range filters the experts and the trace", async ({ page }) => {
  const from = records.start[4000];
  const to = records.start[9000];
  await open(page, "one.html", `view=experts&below=trace&time=${from}-${to}&filter=1`);
  const rows = routing.start.filter((t: number) => t >= from && t < to).length;
  await expect(page.locator(".experts .toolbar")).toContainText(`${(rows * 4).toLocaleString("en-US")} selections`);
  const n = records.start.filter((t: number) => t >= from && t < to).length;
  await expect(page.locator(".trace .toolbar")).toContainText(`${n.toLocaleString("en-US")} of 20,000 records`);
});

test("the playback moves the window to the end", async ({ page }) => {
  await open(page, "one.html", "view=experts");
  await page.getByLabel("Duration of the playback").selectOption("5");
  await page.getByLabel("Window", { exact: true }).selectOption("0.1");
  await page.getByRole("button", { name: "Play" }).click();
  await expect.poll(async () => Number((await selected(page, "time"))?.split("-")[0]), { timeout: 20_000 }).toBeGreaterThan(data.duration * 0.85);
  await expect(page.getByRole("button", { name: "Play" })).toBeVisible();
});

test("two inputs are next to each other and share the selection", async ({ page }) => {
  await open(page, "two.html", "view=tokens&token=20");
  await expect(page.locator('.token[aria-selected="true"]')).toHaveCount(2);
  await page.locator("#t1-25").click();
  await expect(page.locator("#t0-25")).toHaveAttribute("aria-selected", "true");
  await page.getByLabel("Inputs", { exact: true }).selectOption("1");
  await expect(page.locator("#main-panes .pane:visible")).toHaveCount(1);
  await page.getByRole("tab", { name: "Curves" }).click();
  await expect(page.locator(".chart-column:visible[data-input='0']")).toHaveCount(0);
});

test("the fragment restores the selection", async ({ page }) => {
  const fragment = "view=file&below=graph&layer=2&expert=9&tensor=blk.2.ffn_up_exps.weight&token=14&time=100-9000000";
  await open(page, "one.html", fragment);
  await expect(page.locator("#selected-tensor")).toHaveValue("blk.2.ffn_up_exps.weight");
  await expect(page.locator("#selected-token")).toHaveValue("14");
  await expect(page.locator(".pane[data-view=graph]")).toBeVisible();
  await page.keyboard.press("Escape");
  await expectKey(page, "layer", null);
  await expect(page.locator("#selected-token")).toHaveValue("");
});
