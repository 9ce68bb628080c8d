// Digest of the front end's sources: all files but the installed packages, in the order of their names.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join, relative, sep } from "node:path";

function files(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((each) => {
    if (each.name === "node_modules" || each.name.startsWith(".")) return [];
    const path = join(folder, each.name);
    return each.isDirectory() ? files(path) : [path];
  });
}

export function digest(root) {
  const hash = createHash("sha256");
  const named = files(root).map((path) => [relative(root, path).split(sep).join("/"), path]);
  named.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0));
  for (const [name, path] of named) {
    const content = readFileSync(path);
    hash.update(`${name}\0${content.length}\0`);
    hash.update(content);
  }
  return hash.digest("hex");
}
