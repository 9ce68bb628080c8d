// Builds the front end into the Python package. File names are fixed and the output depends on the sources alone, so that
// the same sources give the same bytes; `sources.json` has the digest that tests/ui/test_assets.py compares.
import { writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { defineConfig } from "vite";
import { digest } from "./digest.js";

const out = resolve(import.meta.dirname, "../src/rollwright/ui/static");

export default defineConfig({
  base: "/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    outDir: out,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "app.js", chunkFileNames: "app-[name].js", assetFileNames: "app[extname]" },
    },
  },
  plugins: [
    {
      name: "sources-digest",
      closeBundle() {
        writeFileSync(resolve(out, "sources.json"), JSON.stringify({ sha256: digest(import.meta.dirname) }) + "\n");
      },
    },
  ],
});
