import { defineConfig } from "@playwright/test";

// The browser is Debian's: apt-get install chromium. Playwright downloads none.
export default defineConfig({
  testDir: ".",
  outputDir: "out/results",
  globalSetup: "./setup.ts",
  workers: 1,
  timeout: 180_000,
  expect: { timeout: 30_000 },
  reporter: "list",
  use: {
    viewport: { width: 1440, height: 900 },
    launchOptions: { executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", "--disable-dev-shm-usage"] },
  },
});
