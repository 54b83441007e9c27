/** Functions that need no browser. */
import { readFileSync } from "node:fs";
import { expect, test } from "@playwright/test";
import { lowerBound } from "../src/analysis";
import { bytes, running, shortName, ticks, time, visible } from "../src/format";
import { radixSort } from "../src/rows";
import { EMPTY, fromFragment, toFragment } from "../src/selection";

test("the fragment keeps every key", () => {
  const s = { ...EMPTY, view: "file", below: "trace", input: 1, layer: 3, expert: 0, tensor: "blk.3.a&b=c", name: "x y", token: 7, time: [5, 9] as [number, number], op: "MUL_MAT", record: [1, 12] as [number, number], filter: true };
  expect(fromFragment(`#${toFragment(s)}`)).toEqual(s);
});

test("the fragment ignores invalid values", () => {
  expect(fromFragment("view=file&layer=-1&expert=x&token=&time=9-3&record=5&input=1e9&foo=1")).toEqual({ ...EMPTY, view: "file" });
});

test("radixSort is stable and sorts fractions", () => {
  const keys = Float64Array.from({ length: 5000 }, (_, i) => (i * 7919) % 613 + ((i * 31) % 7) / 8);
  const rows = Uint32Array.from(keys, (_, i) => 2 * i);
  const expected = Array.from(rows).sort((a, b) => keys[a / 2] - keys[b / 2]);
  expect(Array.from(radixSort(rows, keys))).toEqual(expected);
});

test("lowerBound returns the first element that is not smaller", () => {
  expect([0, 1, 2, 5, 6].map((v) => lowerBound([1, 2, 2, 5], v))).toEqual([0, 0, 1, 3, 4]);
});

test("numbers have units", () => {
  expect([bytes(0), bytes(1536), bytes(5 * 2 ** 30), bytes(-1)]).toEqual(["0 B", "1.50 KiB", "5.00 GiB", "unknown"]);
  expect([time(999, "ns"), time(1500, "ns"), time(2.5e6, "ns"), time(3e9, "ns"), time(1234, "step")]).toEqual(["999 ns", "1.50 µs", "2.500 ms", "3.000 s", "step 1,234"]);
  expect(ticks(0, 100, 5)).toEqual([0, 20, 40, 60, 80, 100]);
  expect(["runs/a", "/a/b/c.json", "c:\\x\\y\\", "a"].map(shortName)).toEqual(["runs/a", "b/c.json", "x/y", "a"]);
  expect([visible(" a\n", 0), visible(null, 3), running(" a b", 0), running(" ", 0)]).toEqual(["␣a↵", "#3", " a b", "␣"]);
});

test("the bundle is small, and requests nothing", () => {
  const html = readFileSync(new URL("../dist/report.html", import.meta.url), "utf8");
  expect(html.length).toBeLessThan(250_000);
  expect(html).not.toMatch(/(src|href)="(https?:)?\/\//);
});
