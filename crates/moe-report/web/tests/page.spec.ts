/** Properties of the page: accessibility, keyboard, robustness, size, large reports. */
import { statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { expect, test } from "@playwright/test";
// @ts-expect-error The generator is plain JavaScript.
import { makeReport } from "../dev/sample.mjs";
import { colors, go, expectKey, open, out, selected, VIEWS } from "./page";

const axe = createRequire(import.meta.url)("axe-core") as typeof import("axe-core");

for (const scheme of ["light", "dark"] as const) {
  for (const view of VIEWS) {
    test(`axe reports no violation: ${view}, ${scheme}`, async ({ page }) => {
      await page.emulateMedia({ colorScheme: scheme });
      await open(page, "two.html", `view=${view}&layer=3&expert=8&token=20`);
      await page.waitForTimeout(300);
      await page.evaluate(axe.source);
      const violations = await page.evaluate(async () => {
        const results = await (window as unknown as { axe: typeof axe }).axe.run(document, { resultTypes: ["violations"] });
        return results.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target).join(" | ")}`);
      });
      expect(violations).toEqual([]);
    });
  }
}

test("every view draws its canvas", async ({ page }) => {
  await open(page, "one.html");
  for (const [view, canvas, least] of [["graph", ".graph-map canvas", 6], ["file", ".file-map canvas", 12], ["experts", ".matrix canvas", 12], ["curves", ".uplot canvas", 5], ["curves", ".timeline canvas", 5]] as const) {
    await go(page, `view=${view}`);
    await page.locator(canvas).first().scrollIntoViewIfNeeded();
    await expect.poll(() => colors(page, canvas), { message: view }).toBeGreaterThan(least);
  }
});

test("texts of tokens are never parsed as HTML", async ({ page }) => {
  await open(page, "one.html", "view=tokens");
  await expect(page.locator("#t0-1")).toHaveText("</script><b onclick=alert(1)>&amp;\u2028");
  await expect(page.locator(".token b")).toHaveCount(0);
});

test("keys select views, tokens and layers", async ({ page }) => {
  await open(page, "one.html", "view=overview");
  await page.keyboard.press("6");
  await expectKey(page, "view", "tokens");
  await page.keyboard.press("]");
  await page.keyboard.press("]");
  await expectKey(page, "token", "1");
  await page.keyboard.press("}");
  await expectKey(page, "layer", "0");
  await page.keyboard.press("5");
  await page.locator(".matrix canvas").focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowDown");
  await expectKey(page, "layer", "1");
  await page.keyboard.press("3");
  await page.getByRole("grid").focus();
  await page.keyboard.press("Home");
  await page.keyboard.press("ArrowDown");
  await expect(page.locator('.row[aria-selected="true"]')).toHaveAttribute("aria-rowindex", "3");
  await page.keyboard.press("?");
  await expect(page.getByRole("dialog")).toBeVisible();
});

test("the zoom of the file stays between 0.1 and 500", async ({ page }) => {
  await open(page, "one.html", "view=file&layer=4&expert=3");
  const zoom = page.locator(".zoom");
  await page.locator(".file-map canvas").focus();
  for (let i = 0; i < 12; i++) await page.keyboard.press("+");
  await expect(zoom).toHaveText("500 ×");
  for (let i = 0; i < 16; i++) await page.keyboard.press("-");
  await expect(zoom).toHaveText("0.1 ×");
  await page.getByRole("button", { name: "To selection" }).click();
  await page.locator(".file-map canvas").click({ position: { x: 560, y: 300 } });
  await expect.poll(() => selected(page, "tensor")).toContain("blk.4.");
});

test("the search of the graph finds a node", async ({ page }) => {
  await open(page, "one.html", "view=graph");
  await page.keyboard.press("/");
  await page.keyboard.type("ffn_moe_down-9");
  await expect(page.locator(".graph .toolbar")).toContainText("1 nodes found");
  await page.keyboard.press("Enter");
  await expectKey(page, "name", "ffn_moe_down-9");
  await expectKey(page, "layer", "9");
});

test("an input without tables, graphs and tensors is shown", async ({ page }) => {
  await open(page, "empty.html");
  for (const view of VIEWS) await go(page, `view=${view}&layer=0&expert=0&token=0&time=0-10`);
  await go(page, "view=trace&below=experts");
  await expect(page.locator(".trace .toolbar")).toContainText("The input contains no records.");
  await expect(page.locator(".experts .toolbar")).toContainText("The input contains no tokens with their experts.");
});

test("prints hide the controls", async ({ page }) => {
  await open(page, "two.html", "view=tokens&token=5");
  await page.emulateMedia({ media: "print" });
  await expect(page.locator(".tabs")).toBeHidden();
  await expect(page.locator(".token-text").first()).toBeVisible();
  expect((await page.pdf()).length).toBeGreaterThan(10_000);
});

test("1,000,000 records can be scrolled, sorted and filtered", async ({ page }) => {
  writeFileSync(out("large.html"), makeReport({ records: 1_000_000 }));
  expect(statSync(out("large.html")).size).toBeLessThan(30e6);
  await open(page, "large.html", "view=trace");
  const grid = page.getByRole("grid");
  await grid.focus();
  await page.keyboard.press("End");
  await expect(page.locator('.row[aria-selected="true"] .c-index')).toHaveText("999,999");
  await page.getByRole("button", { name: "Clear all" }).click();
  await page.locator(".virtual").evaluate((e) => (e.scrollTop = e.scrollHeight / 2));
  await expect.poll(async () => Number((await page.locator(".window .row .c-index").first().textContent())!.replaceAll(",", ""))).toBeGreaterThan(490_000);
  await page.getByRole("button", { name: "duration" }).click();
  await page.getByRole("button", { name: "duration" }).click();
  await grid.focus();
  await page.keyboard.press("Home");
  await expect(page.getByRole("columnheader", { name: "duration" })).toHaveAttribute("aria-sort", "descending");
  await page.getByRole("button", { name: "Clear all" }).click();
  await page.getByLabel("Operation").selectOption("MUL_MAT_ID");
  await page.locator(".trace .toolbar").getByLabel("layer").fill("3");
  await page.keyboard.press("Enter");
  await expect(page.locator(".window .row .c-layer").first()).toHaveText("3");
  await expect(page.locator(".window .row .c-op").first()).toHaveText("MUL_MAT_ID");
});
