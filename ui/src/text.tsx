// Text of trajectories, which is hostile input: everything becomes text nodes, nothing becomes markup. Markdown and code are
// parsed into elements made here; links are shown as text; pictures only where they are data of a bitmap format.
import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";
import { Board, boardIn } from "./board";

const PICTURE = /data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|(\*\*|__)(?=\S)([\s\S]*?\S)\3|(\*|_)(?=[^\s*_])([^*_\n]*?[^\s*_])\5(?![A-Za-z0-9])|!?\[([^\]\n]*)\]\(([^)\s]+)\)/;
const LONG = 6000;

export function inline(text: string): ComponentChildren[] {
  const found: ComponentChildren[] = [];
  let rest = text;
  for (let guard = 0; rest && guard < 2000; guard++) {
    const match = INLINE.exec(rest);
    if (!match) break;
    if (match.index) found.push(rest.slice(0, match.index));
    if (match[1]) found.push(<code>{match[2]}</code>);
    else if (match[3]) found.push(<strong>{match[4]}</strong>);
    else if (match[5]) found.push(<em>{match[6]}</em>);
    else found.push(<span class="link-text">{`${match[7]} (${match[8]})`}</span>);
    rest = rest.slice(match.index + match[0].length);
  }
  if (rest) found.push(rest);
  return found;
}

const WORDS: Record<string, string> = {
  python: "False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield",
  js: "await async break case catch class const continue default delete do else export extends false finally for from function if import in instanceof let new null of return static super switch this throw true try typeof undefined var void while yield interface type",
  sh: "if then else elif fi for while do done case esac in function return export local echo cd set",
  json: "true false null",
};
const ALIASES: Record<string, string> = { py: "python", python3: "python", javascript: "js", typescript: "js", ts: "js", tsx: "js", jsx: "js", bash: "sh", shell: "sh", console: "sh" };
const PIECE = /("""[\s\S]*?"""|'''[\s\S]*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(#[^\n]*|\/\/[^\n]*)|\b(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b|([A-Za-z_]\w*)/g;

export function Code({ text, language = "" }: { text: string; language?: string }) {
  const known = ALIASES[language] ?? language;
  const words = new Set((WORDS[known] ?? "").split(" "));
  const parts: ComponentChildren[] = [];
  if (WORDS[known] && text.length < 50000) {
    let end = 0;
    for (const match of text.matchAll(PIECE)) {
      const [whole, string, comment, number, word] = match;
      const isComment = comment && (known === "python" || known === "sh" ? comment.startsWith("#") : known === "js" && comment.startsWith("//"));
      const kind = string ? "string" : isComment ? "comment" : number ? "number" : word && words.has(word) ? "word" : "";
      if (!kind) continue;
      parts.push(text.slice(end, match.index));
      parts.push(<span class={`code-${kind}`}>{whole}</span>);
      end = match.index + whole.length;
    }
    parts.push(text.slice(end));
  } else parts.push(text);
  return (
    <pre class="code" tabIndex={0} aria-label={language ? `code, ${language}` : "code"}>
      <code>{parts}</code>
    </pre>
  );
}

function blocks(text: string): VNode[] {
  const lines = text.split("\n");
  const found: VNode[] = [];
  let plain: string[] = [];
  const flush = () => {
    if (plain.join("").trim()) found.push(<p>{inline(plain.join("\n"))}</p>);
    plain = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at]!;
    const fence = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const item = /^\s*(?:[-*+]|\d+[.)])\s+/.exec(line);
    if (fence) {
      flush();
      const code: string[] = [];
      while (++at < lines.length && !lines[at]!.trimStart().startsWith(fence[1]!)) code.push(lines[at]!);
      found.push(<Code text={code.join("\n")} language={fence[2]!.toLowerCase()} />);
    } else if (heading) {
      flush();
      found.push(<p class={`heading h${heading[1]!.length}`}>{inline(heading[2]!)}</p>);
    } else if (item) {
      flush();
      const items: string[] = [];
      const ordered = /^\s*\d/.test(line);
      while (at < lines.length && /^\s*(?:[-*+]|\d+[.)])\s+/.test(lines[at]!)) items.push(lines[at++]!.replace(/^\s*(?:[-*+]|\d+[.)])\s+/, ""));
      at--;
      const children = items.map((each) => <li>{inline(each)}</li>);
      found.push(ordered ? <ol>{children}</ol> : <ul>{children}</ul>);
    } else if (/^\s*>/.test(line)) {
      flush();
      const quoted: string[] = [];
      while (at < lines.length && /^\s*>/.test(lines[at]!)) quoted.push(lines[at++]!.replace(/^\s*>\s?/, ""));
      at--;
      found.push(<blockquote>{inline(quoted.join("\n"))}</blockquote>);
    } else if (/^\s*\|.*\|\s*$/.test(line) && /^\s*\|?[\s:|-]+\|[\s:|-]*$/.test(lines[at + 1] ?? "")) {
      flush();
      const cells = (row: string) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
      const head = cells(line);
      const body: string[][] = [];
      at += 2;
      while (at < lines.length && /^\s*\|.*\|\s*$/.test(lines[at]!)) body.push(cells(lines[at++]!));
      at--;
      found.push(
        <table>
          <thead>
            <tr>{head.map((cell) => <th>{inline(cell)}</th>)}</tr>
          </thead>
          <tbody>{body.map((row) => <tr>{row.map((cell) => <td>{inline(cell)}</td>)}</tr>)}</tbody>
        </table>,
      );
    } else if (!line.trim()) flush();
    else plain.push(line);
  }
  flush();
  return found;
}

/** Text as Markdown, or as it is written. Boards are drawn, pictures shown. */
export function Rich({ text, plain = false }: { text: string; plain?: boolean }) {
  const [whole, setWhole] = useState(false);
  if (!text) return <p class="faded">(empty)</p>;
  const picture = PICTURE.exec(text);
  if (picture) {
    return (
      <>
        <Rich text={text.slice(0, picture.index).replace(/!\[[^\]]*\]\($/, "")} plain={plain} />
        <img class="picture" src={picture[0]} alt="picture of the environment" />
        {text.slice(picture.index + picture[0].length).replace(/^\)/, "").trim() && <Rich text={text.slice(picture.index + picture[0].length).replace(/^\)/, "")} plain={plain} />}
      </>
    );
  }
  const board = boardIn(text);
  if (board && !plain) {
    return (
      <>
        {board.before.trim() && <Rich text={board.before} />}
        <Board lines={board.lines} />
        {board.after.trim() && <Rich text={board.after} />}
      </>
    );
  }
  const cut = !whole && text.length > LONG;
  const shown = cut ? text.slice(0, LONG) : text;
  return (
    <div class={plain ? "text plain" : "text"}>
      {plain ? shown : blocks(shown)}
      {cut && (
        <button type="button" class="more" onClick={() => setWhole(true)}>
          show {(text.length - LONG).toLocaleString("en-US")} more characters
        </button>
      )}
    </div>
  );
}
