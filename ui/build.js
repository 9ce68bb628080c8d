// Builds the front end into the Python package. File names are fixed and the output depends on the sources alone, so that
// the same sources give the same bytes; `sources.json` has the digest that tests/ui/test_assets.py compares.
import { copyFileSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";
import { digest } from "./digest.js";

const here = import.meta.dirname;
const out = join(here, "../src/rollwright/ui/static");

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: join(here, "src/main.tsx") },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "public", name), join(out, name));
writeFileSync(join(out, "sources.json"), JSON.stringify({ sha256: digest(here) }) + "\n");
