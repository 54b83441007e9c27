/** Helpers that open a report and read its state. */
import { fileURLToPath, pathToFileURL } from "node:url";
import { expect, type Page } from "@playwright/test";

export function out(name: string): string {
  return fileURLToPath(new URL(`out/${name}`, import.meta.url));
}

/** Opens a report, and fails the test after an error or a request to anything but the file itself. */
export async function open(page: Page, name: string, fragment = ""): Promise<void> {
  const url = pathToFileURL(out(name)).href;
  page.on("pageerror", (error) => expect(error.message, "error in the page").toBe(""));
  page.on("console", (message) => message.type() === "error" && expect(message.text(), "error message of the page").toBe(""));
  page.on("request", (request) => {
    const target = request.url();
    const allowed = target.startsWith("blob:") || target.startsWith("data:") || target.split("#")[0] === url;
    expect(allowed, `request of ${target.slice(0, 100)}`).toBe(true);
  });
  await page.goto(fragment ? `${url}#${fragment}` : url);
  await ready(page);
}

export async function ready(page: Page): Promise<void> {
  await expect(page.locator("html")).toHaveAttribute("data-ready", "true", { timeout: 120_000 });
}

/** Changes keys of the fragment, as a link would. */
export async function go(page: Page, fragment: string): Promise<void> {
  await page.evaluate((f) => (location.hash = f), fragment);
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
}

/** Value of a key of the fragment. */
export async function selected(page: Page, key: string): Promise<string | null> {
  return new URLSearchParams(new URL(page.url()).hash.slice(1)).get(key);
}

/** Waits until a key of the fragment has a value. */
export async function expectKey(page: Page, key: string, value: string | null): Promise<void> {
  await expect.poll(() => selected(page, key), { message: key }).toBe(value);
}

/** Number of distinct colors of a canvas: 1 if nothing is drawn. */
export async function colors(page: Page, selector: string): Promise<number> {
  return page.locator(selector).first().evaluate((canvas: HTMLCanvasElement) => {
    const { data } = canvas.getContext("2d")!.getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  });
}

export const VIEWS = ["overview", "graph", "trace", "file", "experts", "tokens", "curves"];
