/** The page of a server, with a server that counts up. */
import { readFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import { createRequire } from "node:module";
import { expect, test } from "@playwright/test";
import { colors, out } from "./page";

const axe = createRequire(import.meta.url)("axe-core") as typeof import("axe-core");
const LAYERS = 24;

/** The page as `live_page` in moe-report writes it. */
const page = readFileSync(new URL("../dist/report.html", import.meta.url), "utf8")
  .replace("default-src 'none'", "default-src 'none'; connect-src 'self'")
  .replace("<!--report:title-->", "tiny – moe-analyze")
  .replace("<!--report:json-->", '{"schema":"moe-analyze.live.v1"}')
  .replace("<!--report:tables-->", "");

interface Fake {
  url: string;
  server: Server;
  polls: string[];
  /** Value of the header of a key; null if the server has none. */
  key: string | null;
}

function state(n: number, selected: number | null) {
  const request = (id: number, outcome: string | null) => ({ id, outcome, n_prompt: 40 + id, n_generated: outcome ? 200 : 30 + 40 * n, queue_seconds: 0.012, seconds: outcome ? 4.25 : 1 + n });
  const layer = (layer: number) => ({ layer, selections: Array.from({ length: 64 }, (_, e) => (e * 31 + layer * 17 + n) % 13) });
  return {
    schema: "moe-analyze.live.v1", model: "tiny-qwen3moe", seconds: 5 + n, n_slots: 4, n_running: 1 + (n % 3), n_queued: n % 2, queue_capacity: 64,
    prompt_tokens: 1000 + 300 * n, prompt_seconds: n, generated_tokens: 5000 + 80 * n + 10 * (n % 3), generation_seconds: n,
    lanes: [{ name: "hot0", tier: "gpu", selections: 900 * n + 50 * (n % 4) }, { name: "cold", tier: "ram", selections: 300 * n }],
    requests: [request(9, null), ...Array.from({ length: 8 }, (_, i) => request(8 - i, i === 2 ? "cancelled" : "end_of_generation"))],
    selected: selected === null ? null : { id: selected, layers: Array.from({ length: LAYERS }, (_, l) => layer(l)) },
  };
}

async function start(key: string | null = null): Promise<Fake> {
  const fake: Fake = { url: "", polls: [], key, server: createServer((request, response) => {
    const { pathname, searchParams } = new URL(request.url!, "http://localhost");
    if (pathname === "/") return response.setHeader("content-type", "text/html; charset=utf-8").end(page);
    fake.polls.push(request.url!);
    if (pathname !== "/ui/state") return response.writeHead(404).end();
    if (fake.key !== null && request.headers["x-api-key"] !== fake.key) return response.writeHead(401).end("{}");
    const id = searchParams.get("request");
    response.setHeader("content-type", "application/json").end(JSON.stringify(state(fake.polls.length, id === null ? null : Number(id))));
  }) };
  await new Promise<void>((done) => fake.server.listen(0, "127.0.0.1", done));
  fake.url = `http://127.0.0.1:${(fake.server.address() as { port: number }).port}/`;
  return fake;
}

test("the page of a server shows its state and the experts of a request", async ({ page }) => {
  const fake = await start();
  page.on("pageerror", (error) => expect(error.message, "error in the page").toBe(""));
  page.on("request", (request) => expect(request.url().startsWith(fake.url) || request.url().startsWith("blob:"), request.url()).toBe(true));
  await page.goto(fake.url);
  await expect(page.locator("h1")).toHaveText("tiny-qwen3moe");
  await expect(page.locator(".requests tbody tr")).toHaveCount(9);
  // The newest request is selected first.
  await expect(page.locator(".live-detail h2")).toContainText("Experts of request 9");
  await expect.poll(() => colors(page, ".matrix canvas")).toBeGreaterThan(8);
  await page.getByRole("button", { name: "Show the experts of request 4" }).click();
  await expect(page.locator(".live-detail h2")).toContainText("Experts of request 4: 244 tokens");
  await expect(page.locator(".live-text")).toBeEmpty();
  await expect(page.locator(".tiles")).toContainText("hit rate, last 5 s7");
  await expect.poll(() => fake.polls.length).toBeGreaterThan(12);
  await expect(page.locator(".chart")).toHaveCount(3);
  await expect.poll(() => colors(page, ".uplot canvas")).toBeGreaterThan(5);
  await page.screenshot({ path: out("live.png") });
  await page.evaluate(axe.source);
  const violations = await page.evaluate(async () => {
    const results = await (window as unknown as { axe: typeof axe }).axe.run(document, { resultTypes: ["violations"] });
    return results.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target).join(" | ")}`);
  });
  expect(violations).toEqual([]);
  fake.server.closeAllConnections();
  fake.server.close();
  await expect(page.getByRole("status").first()).toContainText("does not answer");
});

test("the page of a server asks for the API key", async ({ page }) => {
  const fake = await start("secret");
  await page.goto(fake.url);
  await expect(page.getByRole("status").first()).toHaveText("The server needs an API key.");
  await page.getByLabel("API key of the server").fill("wrong");
  await page.keyboard.press("Enter");
  await expect(page.getByRole("status").first()).toHaveText("The API key is wrong.");
  await page.getByLabel("API key of the server").fill("secret");
  await page.keyboard.press("Enter");
  await expect(page.locator(".requests tbody tr")).toHaveCount(9);
  await expect(page.locator(".login")).toBeHidden();
  fake.server.closeAllConnections();
  fake.server.close();
});
