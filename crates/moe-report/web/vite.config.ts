import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { defineConfig, type Plugin } from "vite";

const MARKERS = ["<!--report:title-->", "<!--report:json-->", "<!--report:tables-->"];

/** Replaces the script and the style sheet of the bundle by one file, the template `report.html`. */
function template(): Plugin {
  return {
    name: "report-template",
    enforce: "post",
    generateBundle(_, bundle) {
      let script = "";
      let style = "";
      for (const [name, file] of Object.entries(bundle)) {
        if (file.type === "chunk") script += file.code;
        else if (name.endsWith(".css")) style += file.source;
        else this.error(`unexpected output file ${name}`);
        delete bundle[name];
      }
      const source = readFileSync(new URL("template.html", import.meta.url), "utf8")
        .replace("<!--style-->", () => style.trim())
        .replace("<!--script-->", () => script.trim().replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--"));
      for (const marker of MARKERS) {
        if (source.split(marker).length !== 2) this.error(`${marker} must occur exactly once`);
      }
      this.emitFile({ type: "asset", fileName: "report.html", source });
      // The program contains this file.
      this.emitFile({ type: "asset", fileName: "report.html.gz", source: gzipSync(source, { level: 9 }) });
    },
  };
}

export default defineConfig({
  plugins: [template()],
  build: {
    target: "es2022",
    modulePreload: false,
    lib: { entry: "src/main.ts", formats: ["iife"], name: "moeReport", cssFileName: "report" },
    reportCompressedSize: true,
  },
  worker: { format: "iife" },
});
