/** Writes the synthetic reports that the tests open. */
import { mkdirSync, writeFileSync } from "node:fs";
// @ts-expect-error The generator is plain JavaScript.
import { makeReport } from "../dev/sample.mjs";
import { out } from "./page";

export default function setup(): void {
  mkdirSync(out(""), { recursive: true });
  writeFileSync(out("one.html"), makeReport({ records: 20_000, hostile: true }));
  writeFileSync(out("two.html"), makeReport({ records: 20_000, inputs: 2 }));
  writeFileSync(out("empty.html"), makeReport({ records: 0, prompt: 0, bare: true }));
}
